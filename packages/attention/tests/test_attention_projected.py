"""Projected attention: equal results from hidden states, and queries in flight during the projection of keys."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.attention import AttentionMask, Local, Method, Ring, Ulysses, UPipe, WallFacer
from armillary.attention.kernels import Dense
from armillary.core import Axis
from armillary.core.testing import mesh, relative_error
from conformance import Case, check

EVENTS: list[str] = []


class Linear(nn.Module):
    """Linear projections that record their calls."""

    heads, key_heads = 8, 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, n * 16, dtype=torch.float64) for n in (8, 2, 2))

    def q(self, x: Tensor, heads: range) -> Tensor:
        record_projection("q", heads)
        return self.to_q(x).unflatten(-1, (-1, 16))[:, :, list(heads)]

    def kv(self, x: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        record_projection("kv", heads)
        k, v = (project(x).unflatten(-1, (-1, 16))[:, :, list(heads)] for project in (self.to_k, self.to_v))
        return k, v


def record_projection(name: str, heads: range) -> None:
    """Records a projection, but not those of one head, which only find dims and dtypes before any communication."""
    if len(heads) > 1:
        EVENTS.append(name)


def build(name: str) -> Method:
    if name == "usp":
        axes = mesh(ring=2, ulysses=2)
        return Ulysses(axes["ulysses"], inner=Ring(axes["ring"]))
    return WallFacer(mesh(ring=4)["ring"], team=2)


def compare_projected(name: str) -> tuple[bool, list[str]]:
    """Returns whether results and gradients are the same bits, and the events of the projected call."""
    attend, projections = build(name), Linear()
    layout, mask = attend.layout(30), AttentionMask(causal=True)
    x = torch.randn(2, layout.sizes[attend.shard], 32, dtype=torch.float64, requires_grad=True)
    leaves = [x, *projections.parameters()]
    q, (k, v) = projections.q(x, range(8)), projections.kv(x, range(2))
    plain = attend(q, k, v, mask=mask, layout=layout)
    dout = torch.randn_like(plain)
    expected = [plain, *torch.autograd.grad(plain, leaves, dout)]
    EVENTS.clear()
    noted = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor")
    with pytest.MonkeyPatch.context() as patch:
        for operation in (operation for operation in noted if hasattr(dist, operation)):
            patch.setattr(dist, operation, note(getattr(dist, operation)))
        out = attend.projected(x, projections, mask=mask, layout=layout)
    result = [out, *torch.autograd.grad(out, leaves, dout)]
    return all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), EVENTS[:4]


def note(collective):
    def noted(*args, **kwargs):
        EVENTS.append("sent")
        return collective(*args, **kwargs)

    return noted


@pytest.mark.parametrize("name", ["usp", "wall_facer"])
def test_queries_are_sent_before_keys_are_projected(worlds, name):
    for same, events in worlds(4).run(compare_projected, name):
        assert same
        assert events[:4] == ["q", "sent", "kv", "sent"]


class Watching(Dense):
    """A kernel that records whether autocast is on."""

    autocast_states: ClassVar[set[bool]] = set()

    def forward(self, q, k, v, band, scores):
        self.autocast_states.add(torch.is_autocast_enabled("cpu"))
        return super().forward(q, k, v, band, scores)

    def backward(self, *tensors):
        self.autocast_states.add(torch.is_autocast_enabled("cpu"))
        return super().backward(*tensors)


@pytest.mark.parametrize("attend", [Local(), UPipe(Axis.alone("ulysses"), heads_per_stage=2)], ids=["plain", "stages"])
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.zeros(8)], ids=["", "sinks"])
def test_under_autocast_every_projection_gets_its_gradient(attend, backward_inside, sinks):
    """Autocast caches cast weights, with or without a gradient, for later calls."""
    projections, mask = Linear().float(), AttentionMask(causal=True)
    x = torch.randn(1, 12, 32, requires_grad=True)
    leaves = [x, *(p for p in projections.parameters() if p is not projections.to_k.bias)]  # whose gradient is 0
    kernel = Watching()
    kernel.autocast_states.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend.projected(x, projections, mask=mask, sinks=sinks, kernel=kernel)
        dout = torch.randn_like(out)
        result = torch.autograd.grad(out, leaves, dout, retain_graph=True) if backward_inside else ()
    again = torch.autograd.grad(out, leaves, dout)
    result = result or again
    assert out.dtype == torch.bfloat16 and kernel.autocast_states == {False}
    assert all(map(torch.equal, result, again))
    with torch.autocast("cpu", torch.bfloat16):
        q, (k, v) = projections.q(x, range(8)), projections.kv(x, range(2))
        plain = Local()(q, k, v, mask=mask, sinks=sinks)
    expected = torch.autograd.grad(plain, leaves, dout)
    assert all(relative_error(a, b) < 2e-2 for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("saving", ["checkpoint", "selective"])
def test_projections_are_under_autocast_inside_a_dispatch_mode(saving):
    """Selective checkpointing is such a mode, inside which torch reports autocast as off."""
    attend = UPipe(Axis.alone("ulysses"), heads_per_stage=2)
    case = Case(dtype=torch.float32, autocast=torch.bfloat16, saving=saving, projected=True, kind="contiguous")
    check(attend, case)
