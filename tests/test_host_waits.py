"""No file that a training step runs has code that makes the host wait for a GPU. Read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "packages"
RUN_BY_A_STEP = [
    "core/src/armillary/core/collectives",
    "core/src/armillary/core/gradients.py",
    "core/src/armillary/core/move_tables.py",
    "core/src/armillary/core/spans.py",
    "core/src/armillary/core/token_chunks.py",
    "attention/src/armillary/attention/call/recompute.py",
    "attention/src/armillary/attention/kernels",
    "attention/src/armillary/attention/methods",
    "attention/src/armillary/attention/rotation",
    "attention/src/armillary/attention/tiling",
    "attention/src/armillary/attention/call",
    "models/src/armillary/models/activation_checkpoint",
    "models/src/armillary/models/layers",
    "models/src/armillary/models/loss",
    "models/src/armillary/models/parallel/tensor_parallelism.py",
    "models/src/armillary/models/block.py",
    "models/src/armillary/models/gpt.py",
    "models/src/armillary/models/llama.py",
    "train/src/armillary/train/step.py",
]
METHODS = {"item", "tolist", "nonzero", "cpu", "record_stream", "synchronize", "masked_select"}

ALLOWED = {
    "attention/call/recompute.py: tolist": "random states, which are on the host",
    "core/spans.py: tolist": "numbers on the host",
    "core/gradients.py: tolist": "ranks of a mesh, on the host",
    "attention/tiling/tiles.py: tolist": "numbers on the host",
    "attention/tiling/grid.py: tolist": "numbers on the host",
    "attention/tiling/block.py: tolist": "lengths of packed pieces, on the host",
    "attention/tiling/block.py: tensor": "made on the host once for a mask, and sent from pinned memory",
    "models/loss/labels.py: cpu": "positions of labels, read once when they are computed",
    "models/loss/labels.py: tolist": "positions of labels on the host, if the caller gave them there",
    "models/loss/labels.py: tensor": "bounds of a chunk, searched on the host",
    "attention/kernels/kernel.py: tensor": "made on the host, and sent from pinned memory",
    "attention/call/calls.py: item": "a module's number, on the host",
    "train/step.py: item": "the metrics",
}


def waits(tree: ast.AST) -> Iterator[str]:
    """Yields the expressions that would wait: a method of `METHODS`, an index by a list, a tensor made of numbers."""
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
    """True for a type such as Callable[[int], str]."""
    return isinstance(node.value, ast.Name) and node.value.id[0].isupper()


def test_steps_have_only_allowed_host_waits():
    files = [
        file
        for name in RUN_BY_A_STEP
        for file in ([ROOT / name] if name[-3:] == ".py" else (ROOT / name).rglob("*.py"))
    ]
    actual = {f"{short(file)}: {wait}" for file in files for wait in waits(ast.parse(file.read_text()))}
    assert actual == set(ALLOWED)


def short(file: Path) -> str:
    """Path within its package, such as "attention/call/recompute.py"."""
    return file.relative_to(ROOT).as_posix().partition("armillary/")[2]
