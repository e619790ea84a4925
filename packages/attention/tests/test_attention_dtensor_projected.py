"""Projected attention on a DTensor of hidden states: results, gradients and placements, compared with the oracle."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from armillary.attention import AttentionMask, build_attention, reference_attention
from armillary.core.testing import mesh, relative_error

EXACT = 1e-10
B, E, H, K, D, DV = 2, 12, 8, 4, 8, 4
TOKENS, BATCH, HEADS, WHOLE = Shard(1), Shard(0), Shard(2), Replicate()
SHAPES = {"x": (B, 0, E), "wq": (H * D, E), "wk": (K * D, E), "wv": (K * DV, E), "sinks": (H,), "dout": (B, 0, H, DV)}
MASK = AttentionMask(window=(9, 0))


def full_tensors(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = {name: [length if size == 0 else size for size in shape] for name, shape in SHAPES.items()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


class Linear(NamedTuple):
    """Linear projections of local tensors or DTensors."""

    wq: Tensor
    wk: Tensor
    wv: Tensor
    parts: int = 1

    @property
    def heads(self) -> int:
        return H // self.parts

    @property
    def key_heads(self) -> int:
        return K // self.parts

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return self._of(x, self.wq, heads, D)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._of(x, self.wk, heads, D), self._of(x, self.wv, heads, DV)

    def parameters(self) -> list[Tensor]:
        return [self.wq, self.wk, self.wv]

    def _of(self, x: Tensor, weight: Tensor, heads: Sequence[int], dim: int) -> Tensor:
        if len(heads) * dim != len(weight):
            weight = weight.unflatten(0, (-1, dim))[list(heads)].flatten(0, 1)
        return F.linear(x, weight).view(*x.shape[:2], -1, dim)


class Form(NamedTuple):
    """Placements of a call.

    Args:
        axes: axes of the mesh, with ranks and the placement of x.
        weights: placements of DTensor weights on the last of these axes; plain tensors if left out.
    """

    method: str
    axes: dict[str, tuple[int, Placement]]
    weights: list[Placement] | None = None
    length: int = 15
    compiled: bool = False


def ring(size: int = 2) -> dict[str, tuple[int, Placement]]:
    return {"ring": (size, TOKENS)}


USP: dict[str, tuple[int, Placement]] = {"ring": (2, TOKENS), "ulysses": (2, TOKENS)}
DATA, COPIES = {"shard": (2, BATCH)}, {"tp": (2, WHOLE)}
ON_FOUR = [
    Form("usp", USP),
    Form("usp", USP, [WHOLE, WHOLE], compiled=True),
    Form("upipe+ring", USP, [WHOLE, WHOLE], length=11),
    Form("ulysses", DATA | {"ulysses": (2, TOKENS)}, [WHOLE, WHOLE]),
    Form("ring", ring() | COPIES, [Shard(0)]),
    Form("upipe", {"ulysses": (2, TOKENS)} | COPIES, [WHOLE, Shard(0)]),
]
ON_EIGHT = [
    Form("usp", USP | COPIES, [WHOLE, WHOLE, Shard(0)]),
    Form("ring", DATA | ring() | COPIES, [WHOLE, WHOLE, Shard(0)]),
    Form("token_ring", ring(4) | COPIES, length=23),
    Form("upipe+ring", DATA | USP),
]


def errors(form: Form) -> dict[str, float]:
    """Returns relative errors of out and the gradients."""
    built = mesh(**{name: size for name, (size, _) in form.axes.items()})
    over, attend = built[tuple(form.axes)], build_attention(form.method, built)
    layout, leaves = attend.layout(form.length, "contiguous"), placed_leaves(form, over)
    parts = 2 if Shard(0) in cuts(form) else 1

    def run(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, sinks: Tensor) -> Tensor:
        return attend.projected(x, Linear(wq, wk, wv, parts), mask=MASK, layout=layout, sinks=sinks)

    out = (torch.compile(run, backend="aot_eager", fullgraph=True) if form.compiled else run)(**leaves)
    assert isinstance(out, DTensor) and out.shape == (B, form.length, H, DV)
    placements = [placed for _, placed in form.axes.values()]
    heads = [HEADS if cut == Shard(0) else placed for placed, cut in zip(placements, cuts(form), strict=True)]
    assert list(out.placements) == heads
    dout = distribute_tensor(full_tensors(form.length)["dout"], over, heads)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    # weights lack some axes of x's mesh; over these their gradients are partial
    placements_of_sums = [
        Partial() if isinstance(placed, Shard) else cut for placed, cut in zip(placements, cuts(form), strict=True)
    ]
    actual = {"out": out.detach()} | {
        name: grad
        if isinstance(grad, DTensor) and grad.device_mesh == over
        else partial_over(grad, over, placements_of_sums)
        for name, grad in zip(leaves, grads, strict=True)
    }
    return {name: relative_error(actual[name].full_tensor(), its) for name, its in expected(form.length).items()}


def partial_over(grad: Tensor, over: DeviceMesh, placements: list[Placement]) -> DTensor:
    return DTensor.from_local(grad.to_local() if isinstance(grad, DTensor) else grad, over, placements)


def cuts(form: Form) -> list[Placement]:
    """Returns the placements of weights on all axes of the mesh of x."""
    weights = form.weights or []
    return [WHOLE] * (len(form.axes) - len(weights)) + weights


def placed_leaves(form: Form, over: DeviceMesh) -> dict[str, Tensor]:
    tensors, placements = full_tensors(form.length), [placed for _, placed in form.axes.values()]
    leaves = {"x": distribute_tensor(tensors["x"], over, placements)}
    for name in ("wq", "wk", "wv"):
        its = tuple(form.axes)[len(form.axes) - len(form.weights or ()) :]
        leaves[name] = distribute_tensor(tensors[name], over[its], form.weights) if form.weights else tensors[name]
    leaves["sinks"] = distribute_tensor(tensors["sinks"], over, cuts(form)) if form.weights else tensors["sinks"]
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def expected(length: int) -> dict[str, Tensor]:
    """Returns out and the gradients, by the formula on one rank in float64."""
    tensors = full_tensors(length)
    dout = tensors.pop("dout")
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    projections = Linear(leaves["wq"], leaves["wk"], leaves["wv"])
    q, (k, v) = projections.q(leaves["x"], range(H)), projections.kv(leaves["x"], range(K))
    out = reference_attention(q, k, v, mask=MASK, sinks=leaves["sinks"])
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def each(forms: list[Form]) -> list[dict[str, float]]:
    return [errors(form) for form in forms]


@pytest.mark.parametrize("forms", [ON_FOUR, pytest.param(ON_EIGHT, marks=pytest.mark.long)], ids=["four", "eight"])
def test_projected_dtensors_equal_one_rank(worlds, forms):
    ranks = 4 if forms is ON_FOUR else 8
    for rank in worlds(ranks).run(each, forms):
        for form, actual in zip(forms, rank, strict=True):
            assert set(actual) == {"out", "x", "wq", "wk", "wv", "sinks"}
            assert max(actual.values()) <= EXACT, (form, actual)
