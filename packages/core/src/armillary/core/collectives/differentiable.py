"""Collectives along one axis that attention is made of, each with its gradient.

    seq_to_head    [B, T, H, D] -> [B, N, h, D]      all tokens of some heads; adjoint: head_to_seq
    head_to_seq    [B, N, h, D] -> [B, T, H, D]      all heads of some tokens; adjoint: seq_to_head
    all_gather     [B, T, ...]  -> [B, N, ...]       all tokens; adjoint: reduce_scatter
    reduce_scatter [B, N, ...]  -> [B, T, ...]       own tokens of the sum; adjoint: all_gather
    merge_scatter  [B, N, H, D] -> [B, T, H, D]      own tokens of partial attention, merged by log-sum-exp

On DTensors they are redistributions on that axis, as torch's `redistribute` is: the same placements, values and
gradients where it has the same one.

                   before                           after          gradient that comes in    that goes back
    seq_to_head    Shard(1)                         Shard(2)       Shard(2)                  Shard(1)
    head_to_seq    Shard(2)                         Shard(1)       Shard(1)                  Shard(2)
    all_gather     Shard(dim)                       Replicate()    Replicate() or Partial()  Shard(dim)
    reduce_scatter Partial()                        Shard(dim)     Shard(dim)                Replicate()
    merge_scatter  LogSumExpPartial(packed=False)   Shard(1)       Shard(1)                  Replicate()

Other axes of their mesh keep their placements, `Shard` or `Replicate`; an axis inside this one must not shard the dim
of the tokens too. Shards are those that DTensor cuts, of which the last may be shorter or empty; for others pass local
tensors and `sizes`.

N are the tokens of the whole axis, T those of this rank. The functions take local tensors and a mesh axis, or DTensors
over a mesh with that axis, and wait. `start_all_gather`, `start_reduce_scatter` and `start_merge_scatter` return at
once, for local tensors and without a gradient, as `start_seq_to_head` and `start_head_to_seq` do: what methods are
built of.

All ranks of an axis must call the same primitives in the same order, and their backward passes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.core.collectives import compiled
from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.all_to_all import start_head_to_seq, start_seq_to_head
from armillary.core.collectives.autograd import check_dims, check_heads, linear, merge
from armillary.core.collectives.collective import check_tokens, tokens_on
from armillary.core.collectives.reduce_scatter import start_reduce_scatter
from armillary.core.layout import cut
from armillary.core.mesh import Axis
from armillary.core.validation import integer


def seq_to_head(
    x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, heads: Sequence[range] | None = None
) -> Tensor:
    """[B, T, H, D], all heads of this rank's tokens -> [B, N, h, D], this rank's heads of all tokens. Differentiable.

    Where ranges of heads overlap, a head goes to each rank that has it, and its gradient is the sum of theirs.

    Args:
        x: local; or a DTensor, of which this is the redistribution from `Shard(1)` on the axis to `Shard(2)`, and its
            gradient that from `Shard(2)` to `Shard(1)`. Where an axis inside this one (tp) shards the heads too, it is
            the redistribution within each of that axis' ranks: the global view of the result has its heads in the order
            in which the ranks hold them, and `head_to_seq` puts them back.
        axis: a 1-D mesh of U ranks, such as `mesh["ulysses"]`.
        sizes: tokens of each rank; as many as this one's unless given.
        heads: which heads each rank gets, in order, together all of them; as torch.tensor_split cuts them unless given
            (a DTensor: as DTensor does).

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all"; backward as `head_to_seq` forward.

    Raises:
        ValueError: sizes, heads or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if compat.is_dtensor(x):
        return dtensors().seq_to_head(x, along, sizes, heads)
    check_dims(x)
    sizes = _sizes(along, sizes, x.shape[1] * along.size)
    heads = cut(range(x.shape[2]), along.size) if heads is None else heads
    check_tokens("x", x, 1, sizes[along.rank], sizes)
    check_heads(heads, along, x.shape[2])
    return linear(x, start_seq_to_head, start_head_to_seq, along, tuple(sizes), tuple(heads))


def head_to_seq(
    x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, heads: Sequence[range] | None = None
) -> Tensor:
    """[B, N, h, D], this rank's heads of all tokens -> [B, T, H, D], all heads of this rank's tokens. Differentiable.

    The inverse of `seq_to_head` where heads do not overlap, and its transpose always: a head of several ranks is
    summed, in float32 at least and in rank order, and its gradient goes to all of them.

    Args:
        x: local; or a DTensor, of which this is the redistribution from `Shard(2)` on the axis to `Shard(1)`, and its
            gradient that from `Shard(1)` to `Shard(2)`; with heads as `seq_to_head` returns them.
        axis: a 1-D mesh of U ranks.
        sizes: tokens of each rank; N / U unless given.
        heads: which heads each rank has, in order, together all of them; h each unless given.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all"; backward as `seq_to_head` forward.

    Raises:
        ValueError: sizes, heads or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if compat.is_dtensor(x):
        return dtensors().head_to_seq(x, along, sizes, heads)
    check_dims(x)
    sizes = _sizes(along, sizes, x.shape[1])
    heads = cut(range(x.shape[2] * along.size), along.size) if heads is None else heads
    check_tokens("x", x, 1, sum(sizes), sizes)
    check_heads(heads, along, None)
    if x.shape[2] != len(heads[along.rank]):
        raise ValueError(f"x {tuple(x.shape)} has {x.shape[2]} heads; rank {along.rank} is to have {heads[along.rank]}")
    return linear(x, start_head_to_seq, start_seq_to_head, along, tuple(sizes), tuple(heads))


def all_gather(x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """[B, T, ...], this rank's tokens -> [B, N, ...], those of all ranks, in rank order. Differentiable.

    The gradient of a token is the sum over ranks, as by `reduce_scatter`.

    Args:
        x: local; or a DTensor, of which this is the redistribution from `Shard(dim)` on the axis to `Replicate()`. Its
            gradient is that from `Replicate()` to `Shard(dim)`, for which nothing is sent, every rank having all of it;
            or that from `Partial()`, where ranks have shares of it.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; as many as this one's unless given.
        dim: of the tokens.

    Bytes sent: (C - 1) times those of `x` padded to max(sizes), kind "all_gather"; backward as `reduce_scatter`
    forward.

    Raises:
        ValueError: sizes or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if compat.is_dtensor(x):
        return dtensors().all_gather(x, along, sizes, dim)
    sizes = _sizes(along, sizes, tokens_on(x, dim) * along.size)
    if torch.compiler.is_compiling():
        return compiled.all_gather(x, along, sizes, dim)
    return linear(x, start_all_gather, start_reduce_scatter, along, tuple(sizes), dim)


def reduce_scatter(x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """[B, N, ...] on every rank -> [B, T, ...], this rank's tokens of the sum over ranks. Differentiable.

    The transpose of `all_gather`. Sums in rank order and in float32 at least.

    Args:
        x: local; or a DTensor, of which this is the redistribution from `Partial()` on the axis to `Shard(dim)`, and
            its gradient that from `Shard(dim)` to `Replicate()`: of each rank's share, the same on all of them.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; N / C unless given.
        dim: of the tokens.

    Bytes sent: those of the other ranks' tokens in `x`, kind "reduce_scatter"; backward as `all_gather` forward.

    Raises:
        ValueError: sizes or placements do not fit. Raised before any communication.
    """
    along = Axis.of(axis)
    if compat.is_dtensor(x):
        return dtensors().reduce_scatter(x, along, sizes, dim)
    sizes = _sizes(along, sizes, tokens_on(x, dim))
    if torch.compiler.is_compiling():
        return compiled.reduce_scatter(x, along, sizes, dim)
    return linear(x, start_reduce_scatter, start_all_gather, along, tuple(sizes), dim)


def merge_scatter(
    out: Tensor, lse: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over each rank's keys -> attention over all keys, for this rank's tokens. Differentiable in both.

    Every rank of the axis has attended with the same N queries to keys of its own. The log-sum-exp merge of what they
    found is scattered: out = sum_r w_r out_r, with w_r = exp(lse_r - lse) and lse = log sum_r exp(lse_r). A row that
    saw nothing has out = 0, lse = -inf and zero gradients. This is step 4 of WallFacer (arXiv 2407.00611).

    Args:
        out: [B, N, H, Dv], local; or a DTensor, of which this is the redistribution from
            `LogSumExpPartial(packed=False)` on the axis to `Shard(1)`, as torch's is of both packed in one. Its
            gradient, of each rank's own part, comes back as `Replicate`, which is what torch calls the gradients of all
            that is partial.
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
    if compat.is_dtensor(out) and compat.is_dtensor(lse):
        return dtensors().merge_scatter(out, lse, along, sizes)
    if compat.is_dtensor(out) or compat.is_dtensor(lse):
        raise ValueError("one of out and lse is a DTensor and the other is not; pass both as DTensors or both as local")
    return merge(out, lse, along, _sizes(along, sizes, out.shape[1]))


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


def dtensors() -> ModuleType:
    """The same functions for DTensors, imported where there are some: torch's DTensor takes seconds to import."""
    from armillary.core.collectives import dtensors

    return dtensors
