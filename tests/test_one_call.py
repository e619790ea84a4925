"""docs/one-call.md says what the code does: its names are there, its excerpt is the code, its stack is the stack."""

import inspect
import re
import sys
import textwrap
from pathlib import Path

import torch

from armillary.attention import AttentionMask, Local, Ring
from armillary.attention.kernels import CpuFlash
from armillary.core.testing import mesh

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/one-call.md").read_text()
SOURCES = {path: path.read_text() for path in ROOT.glob("packages/*/src/armillary/*/**/*.py")}
STACK = re.search(r"six functions are on the stack: ([^.]*(?:\.\w[^.]*)*)\.\n", PAGE)


class Watched(CpuFlash):
    """Notes which functions of ours are on the stack when a tile is computed, outermost first."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "stacks", [])

    def forward(self, *arguments):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if "/armillary/attention/" in frame.f_code.co_filename:
                names.insert(0, frame.f_code.co_qualname)
            frame = frame.f_back
        self.stacks.append(names)
        return super().forward(*arguments)


def stacks_of_ring() -> list[list[str]]:
    attend = Ring(mesh(ring=2)["ring"])
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    kernel = Watched()
    attend(q, k, v, mask=AttentionMask(documents=[0, 3, 9, 16]), layout=attend.layout(16), kernel=kernel)
    return kernel.stacks


def test_the_stack_from_a_call_to_a_kernel_is_the_one_that_the_page_shows(worlds):
    assert STACK
    shown = re.findall(r"`([\w.]+)`", STACK[1])
    assert len(shown) == 6
    for stacks in worlds(2).run(stacks_of_ring):
        assert stacks and all(stack == shown for stack in stacks), (shown, stacks)


def test_the_excerpt_is_the_code_of_ring():
    (excerpt,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    body = inspect.getsource(Ring.forward).split("\n", 1)[1]
    assert textwrap.dedent(body).strip() == excerpt.strip()


def test_the_files_and_names_of_the_page_are_there():
    named = set(re.findall(r"`([\w./]+)`", PAGE)) - {"armillary.core", "torch.compile"}
    assert len(named) > 40
    for name in named:
        if name.startswith("packages/"):
            assert (ROOT / name).is_dir()
        elif name.endswith((".py", "/")):
            assert any(f"/armillary/attention/{name}" in str(path) for path in SOURCES), name
        else:
            last = name.rpartition(".")[2]
            assert any(re.search(rf"^\s*(class|def) {last}\b", source, re.M) for source in SOURCES.values()), name


def test_a_single_rank_walks_the_same_way():
    kernel = Watched()
    Local()(*(torch.randn(1, 8, 2, 8) for _ in range(3)), mask=AttentionMask(), kernel=kernel)
    assert kernel.stacks[-1][-2:] == ["Local.forward", "BlockAttention.forward"]
