"""Differentiable collectives on local tensors: linear ones, and the merge of partial attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.collective import Collective
from armillary.core.collectives.merge import check_partial, pivot, start_merge_scatter
from armillary.core.mesh import Axis
from armillary.core.observe import phase
from armillary.core.validation import check_tensor

Start = Callable[..., Collective[Tensor]]


class _Linear(torch.autograd.Function):
    """A linear collective, whose backward is the adjoint collective, whose backward is the collective again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Start, adjoint: Start, *call: Any) -> Tensor:
        ctx.call = adjoint, start, *call
        return start(x, *call).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Calls `linear`, so that the gradient is differentiable too.
        with phase("backward"):
            return linear(grads[0], *ctx.call), *[None] * len(ctx.call)


def linear(x: Tensor, start: Start, adjoint: Start, *call: Any) -> Tensor:
    """Returns `start(x, *call).wait()`, differentiable; `adjoint(grad, *call)` starts the collective of backward."""
    return cast(Tensor, _Linear.apply(x, start, adjoint, *call))


class _MergeScatter(torch.autograd.Function):
    """The merge of attention over the keys of all ranks (step 4 of WallFacer), with its gradient.

    out and lse are the merged result, out_r and lse_r the attention over the keys of rank r, w_r = exp(lse_r - lse) its
    weight, and a . b the dot product over the head dim. The gradients of rank r are

        d(out_r) = w_r d(out)
        d(lse_r) = w_r (d(out) . out_r + d(lse) - d(out) . out)

    Each rank has d(out), d(lse), out and lse of its own tokens only, and needs d(out), lse and d(lse) - d(out) . out of
    all tokens. So backward gathers d(out), and the two numbers per row.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, axis: Axis, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        merged_out, merged_lse = start_merge_scatter(out, lse, axis, sizes).wait()
        ctx.call = axis, sizes
        ctx.save_for_backward(out, lse, merged_out, merged_lse)
        return merged_out, merged_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dout, dlse), (out, lse, merged_out, merged_lse), (axis, sizes) = grads, ctx.saved_tensors, ctx.call
        # The two numbers per row: lse, and d(lse) - d(out) . out.
        rows = torch.stack([merged_lse, dlse - (dout.to(lse.dtype) * merged_out).sum(-1)], dim=-1)
        with phase("backward"):  # both gathers are in flight together
            gathers = start_all_gather(dout, axis, sizes), start_all_gather(rows, axis, sizes)
        dout, rows = gathers[0].wait(), gathers[1].wait()
        # w_r of every row; 0 for rows without visible keys.
        weight = (lse - pivot(rows[..., 0])).exp()
        dlse = weight * ((dout.to(lse.dtype) * out).sum(-1) + rows[..., 1])
        return (weight.unsqueeze(-1) * dout).to(out.dtype), dlse, None, None


def merge(out: Tensor, lse: Tensor, axis: Axis, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns `start_merge_scatter(...).wait()`, differentiable."""
    check_partial(out, lse, sizes)
    if axis.size == 1:
        return out, lse
    return cast(tuple[Tensor, Tensor], _MergeScatter.apply(out, lse, axis, tuple(sizes)))


def check_dims(x: Tensor) -> None:
    """Raises ValueError unless `x` is a tensor of 4 dims."""
    check_tensor("x", x)
    if x.ndim != 4:
        raise ValueError(f"x {tuple(x.shape)} needs 4 dims, [batch, tokens, heads, head dim]")


def check_heads(heads: Sequence[range], axis: Axis, count: int | None) -> None:
    """Raises ValueError unless `heads` has one range for each rank, in order and without gaps, from 0 on.

    Args:
        count: number of heads at which the last range must end; None if it is unknown.
    """
    requirement = f"one range for each of the {axis.size} ranks of axis {axis.name!r}"
    if len(heads) != axis.size or not all(isinstance(head_range, range) for head_range in heads):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"heads {list(heads)}: {requirement} is needed")
    in_order = all(a.start <= b.start <= a.stop <= b.stop for a, b in pairwise(heads))
    if (
        not in_order
        or heads[0].start != 0
        or any(head_range.step != 1 or head_range.stop < head_range.start for head_range in heads)
    ):
        raise ValueError(f"heads {list(heads)}: {requirement}, from 0 on, in order and without gaps, is needed")
    if count is not None and heads[-1].stop != count:
        raise ValueError(f"heads {list(heads)} end at {heads[-1].stop}; there are {count} heads")
