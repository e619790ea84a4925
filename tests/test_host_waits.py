"""No file that a training step runs through has lines for which the host would wait for a GPU. Read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "packages"
RUN_BY_A_STEP = [
    "core/src/armillary/core/collectives",
    "core/src/armillary/core/accumulate.py",
    "core/src/armillary/core/gradients.py",
    "core/src/armillary/core/token_ranges.py",
    "attention/src/armillary/attention/call/recompute.py",
    "attention/src/armillary/attention/kernels",
    "attention/src/armillary/attention/methods",
    "attention/src/armillary/attention/rotation",
    "attention/src/armillary/attention/tiling",
    "attention/src/armillary/attention/call",
    "models/src/armillary/models/activation_checkpoint",
    "models/src/armillary/models/layers",
    "models/src/armillary/models/loss",
    "models/src/armillary/models/parallel/sharded_modules.py",
    "models/src/armillary/models/block.py",
    "models/src/armillary/models/gpt.py",
    "models/src/armillary/models/llama.py",
    "train/src/armillary/train/run.py",
    "train/src/armillary/train/step.py",
]
METHODS = {"item", "tolist", "nonzero", "cpu", "record_stream", "synchronize", "masked_select"}

ALLOWED = {
    "attention/call/recompute.py: tolist": "states of random numbers, which are the host's",
    "core/token_ranges.py: tolist": "numbers of the host's",
    "attention/tiling/spans.py: tolist": "numbers of the host's",
    "attention/tiling/tiles.py: tolist": "numbers of the host's",
    "attention/tiling/grid.py: tolist": "numbers of the host's",
    "attention/tiling/packs.py: tolist": "lengths of packed pieces, which are the host's",
    "attention/tiling/packs.py: tensor": "made on the host once for a mask, and sent from pinned memory",
    "models/loss/token_logprobs.py: cpu": "positions of labels, read once where they are made",
    "models/loss/token_logprobs.py: tolist": "positions of labels on the host, if the caller gave them there",
    "models/loss/token_logprobs.py: tensor": "bounds of a chunk, searched on the host",
    "attention/call/graph_calls.py: item": "a module's number, which is the host's",
    "attention/call/registered.py: tensor": "a module's number, which is the host's",
    "attention/kernels/packing.py: tensor": "made on the host, and sent from pinned memory",
    "train/step.py: item": "the metrics",
}


def waits(tree: ast.AST) -> Iterator[str]:
    """What a file has that would wait: such a method, an index that is a list, a tensor made of numbers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, node.func.value
            is_creation = name in ("tensor", "as_tensor") and isinstance(owner, ast.Name) and owner.id == "torch"
            if name in METHODS or is_creation:
                yield name
        if isinstance(node, ast.Subscript):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(is_list(part) for part in inside) and not isinstance(node.ctx, ast.Del) and not is_type(node):
                yield "index by a list"


def is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.List | ast.ListComp) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "list"
    )


def is_type(node: ast.Subscript) -> bool:
    """Such as Callable[[int], str]."""
    return isinstance(node.value, ast.Name) and node.value.id[0].isupper()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x[list(heads)]", ["index by a list"]),
        ("x[:, [0, 1]] = y", ["index by a list"]),
        ("f: Callable[[int], str]", []),
        ("torch.tensor(heads, device=x.device).item()", ["item", "tensor"]),
        ("x[:, heads]", []),
    ],
)
def test_host_waits_are_found(line, found):
    assert sorted(waits(ast.parse(line))) == found


def test_nothing_that_a_step_runs_has_the_host_wait():
    files = [
        file
        for name in RUN_BY_A_STEP
        for file in ([ROOT / name] if name[-3:] == ".py" else (ROOT / name).rglob("*.py"))
    ]
    actual = {f"{short(file)}: {what}" for file in files for what in waits(ast.parse(file.read_text()))}
    assert actual == set(ALLOWED)


def short(file: Path) -> str:
    """Such as "attention/call/recompute.py"."""
    return file.relative_to(ROOT).as_posix().partition("armillary/")[2]
