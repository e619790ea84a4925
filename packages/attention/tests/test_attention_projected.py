"""The seam of projected attention: the same result from hidden states, and queries that travel while keys are made."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.attention import AttentionMask, Local, Method, Ring, Ulysses, UPipe, WallFacer
from armillary.core import Axis
from armillary.core.testing import mesh, relative_error
from conformance import Case, check

EVENTS: list[str] = []


class Linear(nn.Module):
    """Plain projections that note when they are called."""

    heads, key_heads = 8, 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, n * 16, dtype=torch.float64) for n in (8, 2, 2))

    def q(self, x: Tensor, heads: range) -> Tensor:
        note_multiplied("q", heads)
        return self.to_q(x).unflatten(-1, (-1, 16))[:, :, list(heads)]

    def kv(self, x: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        note_multiplied("kv", heads)
        k, v = (project(x).unflatten(-1, (-1, 16))[:, :, list(heads)] for project in (self.to_k, self.to_v))
        return k, v


def note_multiplied(what: str, heads: range) -> None:
    """One head alone is made to see what dims and dtypes there are, before anything is sent."""
    if len(heads) > 1:
        EVENTS.append(what)


def build(name: str) -> Method:
    if name == "usp":
        axes = mesh(ring=2, ulysses=2)
        return Ulysses(axes["ulysses"], inner=Ring(axes["ring"]))
    return WallFacer(mesh(ring=4)["ring"], team=2)


def both_ways(name: str) -> tuple[bool, list[str]]:
    """Whether results and gradients are the same bits, and the order of events of the projected call."""
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
def test_queries_are_sent_before_keys_are_multiplied(worlds, name):
    for same, events in worlds(4).run(both_ways, name):
        assert same
        assert events[:4] == ["q", "sent", "kv", "sent"]


@pytest.mark.parametrize("attend", [Local(), UPipe(Axis.alone("ulysses"), heads_per_stage=2)], ids=["plain", "stages"])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_under_autocast_every_projection_gets_its_gradient(attend, backward_inside):
    """Autocast keeps weights that it has cast, with or without a gradient, for whoever asks next."""
    projections, mask = Linear().float(), AttentionMask(causal=True)
    x = torch.randn(1, 12, 32, requires_grad=True)
    leaves = [x, *(p for p in projections.parameters() if p is not projections.to_k.bias)]  # its gradient is 0
    with torch.autocast("cpu", torch.bfloat16):
        out = attend.projected(x, projections, mask=mask)
        dout = torch.randn_like(out)
        result = torch.autograd.grad(out, leaves, dout) if backward_inside else ()
    result = result or torch.autograd.grad(out, leaves, dout)
    with torch.autocast("cpu", torch.bfloat16):
        q, (k, v) = projections.q(x, range(8)), projections.kv(x, range(2))
        plain = Local()(q, k, v, mask=mask)
    expected = torch.autograd.grad(plain, leaves, dout)
    assert all(relative_error(a, b) < 2e-2 for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("saving", ["checkpoint", "selective"])
def test_projections_are_under_autocast_where_a_dispatch_mode_runs_the_op(saving):
    """A selective checkpoint is such a mode. Inside of it torch has turned autocast off for whoever asks."""
    attend = UPipe(Axis.alone("ulysses"), heads_per_stage=2)
    case = Case(dtype=torch.float32, autocast=torch.bfloat16, saving=saving, projected=True, kind="contiguous")
    check(attend, case)
