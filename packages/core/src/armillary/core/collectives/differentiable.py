"""Collectives along one axis that attention is made of, each with its gradient.

    seq_to_head    [B, T, H, D] -> [B, N, h, D]      all tokens of some heads; adjoint: head_to_seq
    head_to_seq    [B, N, h, D] -> [B, T, H, D]      all heads of some tokens; adjoint: seq_to_head
    all_gather     [B, T, ...]  -> [B, N, ...]       all tokens; adjoint: reduce_scatter
    reduce_scatter [B, N, ...]  -> [B, T, ...]       own tokens of the sum; adjoint: all_gather
    merge_scatter  [B, N, H, D] -> [B, T, H, D]      own tokens of partial attention, merged by log-sum-exp

N are the tokens of the whole axis, T those of this rank. The functions take local tensors and a mesh axis, or DTensors
over a mesh with that axis, and wait. `start_all_gather`, `start_reduce_scatter` and `start_merge_scatter` return at
once, for local tensors and without a gradient, as `start_seq_to_head` and `start_head_to_seq` do: what methods are
built of.

All ranks of an axis must call the same primitives in the same order, and their backward passes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core.checked import check_tensor, integer
from armillary.core.collectives import compiled
from armillary.core.collectives.all_to_all import start_head_to_seq, start_seq_to_head
from armillary.core.collectives.collective import Collective
from armillary.core.collectives.gather import (
    check_partial,
    check_tokens,
    pivot,
    start_all_gather,
    start_merge_scatter,
    start_reduce_scatter,
    tokens_on,
)
from armillary.core.layout import cut
from armillary.core.mesh import Axis
from armillary.core.observe.ledger import phase
from armillary.core.placements import (
    MERGED,
    check_chunks,
    check_innermost,
    check_others,
    check_placement,
    chunk_sizes,
    describe,
    dtensor_like,
    held_length,
    local_of,
    mesh_dim,
)

# -- differentiable, on local tensors or DTensors ---------------------------------------------------------------------


def seq_to_head(
    x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, heads: Sequence[range] | None = None
) -> Tensor:
    """[B, T, H, D], all heads of this rank's tokens -> [B, N, h, D], this rank's heads of all tokens. Differentiable.

    Where ranges of heads overlap, a head goes to each rank that has it, and its gradient is the sum of theirs.

    Args:
        x: local; or a DTensor, `Shard(1)` on the axis and, if at all, `Shard(2)` on others. The result of a DTensor is
            `Shard(2)` on the axis and else placed as `x`. Where an axis inside this one (tp) shards the heads too, the
            global view of the result has its heads in the order in which the ranks hold them.
        axis: a 1-D mesh of U ranks, such as `mesh["ulysses"]`.
        sizes: tokens of each rank; as many as this one's unless given.
        heads: which heads each rank gets, in order, together all of them; as torch.tensor_split cuts them unless given
            (a DTensor: as DTensor does).

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all"; backward as `head_to_seq` forward.

    Raises:
        ValueError: sizes, heads or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if isinstance(x, DTensor):
        return _turn_dtensor(x, along, Shard(1), Shard(2), sizes, heads)
    _check_dims(x)
    sizes = _sizes(along, sizes, x.shape[1] * along.size)
    heads = cut(range(x.shape[2]), along.size) if heads is None else heads
    check_tokens("x", x, 1, sizes[along.rank], sizes)
    _check_heads(heads, along, x.shape[2])
    return _linear(x, start_seq_to_head, start_head_to_seq, along, tuple(sizes), tuple(heads))


def head_to_seq(
    x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, heads: Sequence[range] | None = None
) -> Tensor:
    """[B, N, h, D], this rank's heads of all tokens -> [B, T, H, D], all heads of this rank's tokens. Differentiable.

    The inverse of `seq_to_head` where heads do not overlap, and its transpose always: a head of several ranks is
    summed, in float32 at least and in rank order, and its gradient goes to all of them.

    Args:
        x: local; or a DTensor as `seq_to_head` returns it.
        axis: a 1-D mesh of U ranks.
        sizes: tokens of each rank; N / U unless given.
        heads: which heads each rank has, in order, together all of them; h each unless given.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all"; backward as `seq_to_head` forward.

    Raises:
        ValueError: sizes, heads or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if isinstance(x, DTensor):
        return _turn_dtensor(x, along, Shard(2), Shard(1), sizes, heads)
    _check_dims(x)
    sizes = _sizes(along, sizes, x.shape[1])
    heads = cut(range(x.shape[2] * along.size), along.size) if heads is None else heads
    check_tokens("x", x, 1, sum(sizes), sizes)
    _check_heads(heads, along, None)
    if x.shape[2] != len(heads[along.rank]):
        raise ValueError(f"x {tuple(x.shape)} has {x.shape[2]} heads; rank {along.rank} is to have {heads[along.rank]}")
    return _linear(x, start_head_to_seq, start_seq_to_head, along, tuple(sizes), tuple(heads))


def all_gather(x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """[B, T, ...], this rank's tokens -> [B, N, ...], those of all ranks, in rank order. Differentiable.

    The gradient of a token is the sum over ranks, as by `reduce_scatter`.

    Args:
        x: local; or a DTensor, `Shard(dim)` on the axis, of which the result is `Replicate` there. Its gradient may be
            `Replicate` too, and then every rank has all of it; or `Partial`, to be summed over ranks.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; as many as this one's unless given.
        dim: of the tokens.

    Bytes sent: (C - 1) times those of `x` padded to max(sizes), kind "all_gather"; backward as `reduce_scatter`
    forward.

    Raises:
        ValueError: sizes or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if isinstance(x, DTensor):
        place, sizes = _dtensor_tokens("x", x, along, Shard(dim), dim, sizes)
        return cast(Tensor, _GatherDTensor.apply(x, along, sizes, dim, place))
    sizes = _sizes(along, sizes, tokens_on(x, dim) * along.size)
    if torch.compiler.is_compiling():
        return compiled.all_gather(x, along, sizes, dim)
    return _linear(x, start_all_gather, start_reduce_scatter, along, tuple(sizes), dim)


def reduce_scatter(x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """[B, N, ...] on every rank -> [B, T, ...], this rank's tokens of the sum over ranks. Differentiable.

    The transpose of `all_gather`. Sums in rank order and in float32 at least.

    Args:
        x: local; or a DTensor, `Partial()` on the axis, of which the result is `Shard(dim)` there.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; N / C unless given.
        dim: of the tokens.

    Bytes sent: those of the other ranks' tokens in `x`, kind "reduce_scatter"; backward as `all_gather` forward.

    Raises:
        ValueError: sizes or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if isinstance(x, DTensor):
        place, sizes = _dtensor_tokens("x", x, along, Partial(), dim, sizes)
        local = _linear(local_of(x), start_reduce_scatter, start_all_gather, along, sizes, dim)
        return dtensor_like(x, local, x.shape, {place: Shard(dim)})
    sizes = _sizes(along, sizes, tokens_on(x, dim))
    if torch.compiler.is_compiling():
        return compiled.reduce_scatter(x, along, sizes, dim)
    return _linear(x, start_reduce_scatter, start_all_gather, along, tuple(sizes), dim)


def merge_scatter(
    out: Tensor, lse: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over each rank's keys -> attention over all keys, for this rank's tokens. Differentiable in both.

    Every rank of the axis has attended with the same N queries to keys of its own. The log-sum-exp merge of what they
    found is scattered: out = sum_r w_r out_r, with w_r = exp(lse_r - lse) and lse = log sum_r exp(lse_r). A row that
    saw nothing has out = 0, lse = -inf and zero gradients. This is step 4 of WallFacer (arXiv 2407.00611).

    Args:
        out: [B, N, H, Dv], local; or a DTensor, `Partial("logsumexp")` on the axis, of which the result is `Shard(1)`
            there; the gradient of each rank's own part comes back as `Replicate`, which is what torch calls the
            gradients of all that is partial.
        lse: [B, N, H], float32 (float64 if `out` is); likewise.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; N / C unless given.

    Returns:
        (out [B, T, H, Dv], lse [B, T, H]), in the dtypes that came in.

    Bytes sent, for T tokens on each rank: (C - 1) (B T H Dv e + 4 B T H), kind "reduce_scatter"; backward
    (C - 1) (B T H Dv e + 8 B T H), kind "all_gather". In float64 8 and 16.

    Raises:
        ValueError: shapes, dtypes, sizes or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if isinstance(out, DTensor) and isinstance(lse, DTensor):
        if out.device_mesh != lse.device_mesh or out.placements != lse.placements:
            raise ValueError(f"out is {describe(out)}, lse {describe(lse)}; both must be placed alike")
        place, sizes = _dtensor_tokens("out", out, along, MERGED, 1, sizes)
        parts = merge_scatter(local_of(out), local_of(lse), axis, sizes=sizes)
        shard: dict[int, Placement] = {place: Shard(1)}
        return dtensor_like(out, parts[0], out.shape, shard), dtensor_like(lse, parts[1], lse.shape, shard)
    if isinstance(out, DTensor) or isinstance(lse, DTensor):
        raise ValueError("one of out and lse is a DTensor and the other is not; pass both as DTensors or both as local")
    sizes = _sizes(along, sizes, out.shape[1])
    check_partial(out, lse, sizes)
    if along.size == 1:
        return out, lse
    return cast(tuple[Tensor, Tensor], _MergeScatter.apply(out, lse, along, tuple(sizes)))


# -- gradients --------------------------------------------------------------------------------------------------------

Start = Callable[..., Collective[Tensor]]


class _Linear(torch.autograd.Function):
    """A linear collective; its gradient is its adjoint, whose gradient is it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Start, adjoint: Start, *call: Any) -> Tensor:
        ctx.call = adjoint, start, *call
        return start(x, *call).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with phase("backward"):
            return _linear(grads[0], *ctx.call), *[None] * len(ctx.call)


def _linear(x: Tensor, start: Start, adjoint: Start, *call: Any) -> Tensor:
    return cast(Tensor, _Linear.apply(x, start, adjoint, *call))


class _MergeScatter(torch.autograd.Function):
    """With d(out) and d(lse) of the merged result, rank r's gradients are

        d(out_r) = w_r d(out)
        d(lse_r) = w_r (d(out) . out_r + d(lse) - d(out) . out)

    so that what each rank needs of every other are d(out), lse, and one more number for each row.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, axis: Axis, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        merged, total = start_merge_scatter(out, lse, axis, sizes).wait()
        ctx.call = axis, sizes
        ctx.save_for_backward(out, lse, merged, total)
        return merged, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dout, dlse), (out, lse, merged, total), (axis, sizes) = grads, ctx.saved_tensors, ctx.call
        rows = torch.stack([total, dlse - (dout.to(lse.dtype) * merged).sum(-1)], dim=-1)
        with phase("backward"):
            moving = start_all_gather(dout, axis, sizes), start_all_gather(rows, axis, sizes)
        dout, rows = moving[0].wait(), moving[1].wait()
        weight = (lse - pivot(rows[..., 0])).exp()
        dlse = weight * ((dout.to(lse.dtype) * out).sum(-1) + rows[..., 1])
        return (weight.unsqueeze(-1) * dout).to(out.dtype), dlse, None, None


class _GatherDTensor(torch.autograd.Function):
    """`all_gather` of a DTensor, whose gradient says itself whether it is still to be summed over the axis."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, axis: Axis, sizes: tuple[int, ...], dim: int, place: int) -> DTensor:
        ctx.call, ctx.placements = (axis, sizes, dim, place), x.placements
        local = start_all_gather(x.to_local(), axis, sizes, dim).wait()
        return dtensor_like(x, local, x.shape, {place: Replicate()})

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (axis, sizes, dim, place) = grads, ctx.call
        wanted = list(ctx.placements)
        if grad.placements[place] == Partial():
            wanted[place] = Partial()
        local = grad.redistribute(placements=wanted).to_local()
        if wanted[place] == Partial():
            with phase("backward"):
                local = start_reduce_scatter(local, axis, sizes, dim).wait()
        return dtensor_like(grad, local, grad.shape, dict(enumerate(ctx.placements))), None, None, None, None


# -- DTensors ---------------------------------------------------------------------------------------------------------


def _turn_dtensor(
    x: DTensor, axis: Axis, before: Shard, after: Shard, sizes: Sequence[int] | None, heads: Sequence[range] | None
) -> DTensor:
    """Either all-to-all: from `before` on the axis to `after`."""
    _check_dims(x)
    place = mesh_dim(x, axis)
    check_placement("x", x, place, before)
    check_others("x", x, place)
    check_innermost("x", x, place, 1)
    tokens = chunk_sizes(held_length(x, 1, place), axis.size)
    check_chunks("sizes", tokens if sizes is None else sizes, tokens, axis.name)
    ranges = _dtensor_heads(x, axis, place)
    found = ranges if heads is None else heads
    check_chunks("heads", [len(part) for part in found], [len(part) for part in ranges], axis.name)
    _check_heads(found, axis, ranges[-1].stop)
    starts = start_seq_to_head, start_head_to_seq
    local = _linear(local_of(x), *(starts if before == Shard(1) else starts[::-1]), axis, tokens, ranges)
    return dtensor_like(x, local, x.shape, {place: after})


def _dtensor_heads(x: DTensor, axis: Axis, place: int) -> tuple[range, ...]:
    """The heads of each rank of the axis, numbered from the first that this rank's column of the mesh holds."""
    held = held_length(x, 2, place)
    within = prod(x.device_mesh.size(i) for i in range(place + 1, x.device_mesh.ndim) if x.placements[i] == Shard(2))
    if within > 1 and held % (within * axis.size):
        raise ValueError(
            f"{held} heads of {describe(x)} cannot be cut evenly over {axis.size} ranks of axis {axis.name!r} and "
            f"{within} within; give a number of heads that {axis.size * within} divides, or pass local tensors"
        )
    ends = [0]
    for size in chunk_sizes(held // within, axis.size):
        ends.append(ends[-1] + size)
    return tuple(range(a, b) for a, b in pairwise(ends))


def _dtensor_tokens(
    name: str, x: DTensor, axis: Axis, placement: Placement, dim: int, sizes: Sequence[int] | None
) -> tuple[int, tuple[int, ...]]:
    """(the dim of the mesh that is the axis, the tokens of each of its ranks), with the placements of `x` checked."""
    tokens_on(x, dim)
    place = mesh_dim(x, axis)
    check_placement(name, x, place, placement)
    check_others(name, x, place)
    check_innermost(name, x, place, dim)
    expected = chunk_sizes(held_length(x, dim, place), axis.size)
    check_chunks("sizes", expected if sizes is None else sizes, expected, axis.name)
    return place, expected


# -- checks and pieces ------------------------------------------------------------------------------------------------


def _check_dims(x: Tensor) -> None:
    check_tensor("x", x)
    if x.ndim != 4:
        raise ValueError(f"x {tuple(x.shape)} needs 4 dims, [batch, tokens, heads, head dim]")


def _sizes(axis: Axis, sizes: Sequence[int] | None, tokens: int) -> Sequence[int]:
    """Tokens of each rank: as given, or `tokens` in equal parts."""
    if sizes is None:
        if tokens % axis.size:
            raise ValueError(
                f"{tokens} tokens are not divided by the {axis.size} ranks of axis {axis.name!r}; pass sizes="
            )
        return (tokens // axis.size,) * axis.size
    sizes = [integer("sizes", size) for size in sizes]
    if len(sizes) != axis.size or min(sizes) < 0:
        raise ValueError(f"sizes {tuple(sizes)}: one for each of the {axis.size} ranks of axis {axis.name!r} is needed")
    return sizes


def _check_heads(heads: Sequence[range], axis: Axis, count: int | None) -> None:
    """One run of heads for each rank, in order, with no gap between them; together 0..count - 1."""
    wanted = f"one range for each of the {axis.size} ranks of axis {axis.name!r}"
    if len(heads) != axis.size or not all(isinstance(part, range) for part in heads):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"heads {list(heads)}: {wanted} is needed")
    ordered = all(a.start <= b.start <= a.stop <= b.stop for a, b in pairwise(heads))
    if not ordered or heads[0].start != 0 or any(part.step != 1 or part.stop < part.start for part in heads):
        raise ValueError(f"heads {list(heads)}: {wanted}, from 0 on, in order and without gaps, is needed")
    if count is not None and heads[-1].stop != count:
        raise ValueError(f"heads {list(heads)} end at {heads[-1].stop}; there are {count} heads")
