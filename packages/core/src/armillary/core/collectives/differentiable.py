"""Differentiable collectives along one axis.

    seq_to_head    [B, T, H, D] -> [B, N, h, D]      all tokens of this rank's heads; backward: head_to_seq
    head_to_seq    [B, N, h, D] -> [B, T, H, D]      all heads of this rank's tokens; backward: seq_to_head
    all_gather     [B, T, ...]  -> [B, N, ...]       the tokens of all ranks; backward: reduce_scatter
    reduce_scatter [B, N, ...]  -> [B, T, ...]       this rank's tokens of the sum over ranks; backward: all_gather
    merge_scatter  [B, N, H, D] -> [B, T, H, D]      this rank's tokens of partial attention, merged by log-sum-exp
    all_reduce     [...]        -> [...]             the sum over ranks; backward: all_reduce. Local tensors only

N is the number of tokens on all ranks of the axis, T the number on this rank. H is the number of all heads, h the
number on this rank; e is the size of an element in bytes. On DTensors these functions are redistributions along the
axis, with the values and gradients of torch's `redistribute`. Other axes of the mesh keep their placements, `Shard` or
`Replicate`; an axis inside this one must not shard the token dim too. Shards have the sizes of DTensor's chunks: for
others pass local tensors and `sizes`.

These functions wait for their result; those of `collective.py` (`start_all_gather`, ...) return at once, and have no
gradient. All ranks of an axis must call the same collectives in the same order, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.core.argument_checks import check_tensor, integer
from armillary.core.collectives.collective import (
    check_dims,
    check_heads,
    check_tokens,
    linear,
    start_all_gather,
    start_all_reduce,
    start_head_to_seq,
    start_reduce_scatter,
    start_seq_to_head,
    tokens_on,
)
from armillary.core.collectives.merge import merge
from armillary.core.graph_ops import define_linear, traced_axis
from armillary.core.mesh import Axis
from armillary.core.spans import cut


def seq_to_head(
    x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, heads: Sequence[range] | None = None
) -> Tensor:
    """Exchanges tokens for heads: [B, T, H, D] -> [B, N, h, D], this rank's heads of all tokens. Differentiable.

    If ranges of heads overlap, a head is sent to each rank whose range contains it, and its gradients are summed.

    Args:
        x: local tensor; or a DTensor, redistributed from `Shard(1)` on the axis to `Shard(2)`, and its gradient from
            `Shard(2)` to `Shard(1)`. If an axis inside this one (tp) shards the heads too, the ranks of this axis
            exchange only the heads of their tp rank. The result's global view then has its heads reordered;
            `head_to_seq` restores their order.
        axis: a 1-D mesh of U ranks, such as `mesh["ulysses"]`.
        sizes: tokens of each rank; by default T on each.
        heads: one range of heads for each rank, in order and together covering all heads; by default as
            `torch.tensor_split` cuts them, or as DTensor shards them.

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all"; in backward as `head_to_seq`.

    Raises:
        ValueError: sizes, heads or placements do not fit the tensor or the axis. Raised before any communication.
    """
    mesh_axis = Axis.of(axis)
    if compat.is_dtensor(x):
        from armillary.core import dtensor  # DTensor's import takes seconds

        return dtensor.all_to_all(x, mesh_axis, (1, 2), sizes, heads)
    check_dims(x)
    sizes = _sizes(mesh_axis, sizes, x.shape[1] * mesh_axis.size)
    heads = cut(range(x.shape[2]), mesh_axis.size) if heads is None else heads
    check_tokens("x", x, 1, sizes[mesh_axis.rank], sizes)
    check_heads(heads, mesh_axis, x.shape[2])
    return linear(x, start_seq_to_head, start_head_to_seq, mesh_axis, tuple(sizes), tuple(heads))


def head_to_seq(
    x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, heads: Sequence[range] | None = None
) -> Tensor:
    """Exchanges heads for tokens: [B, N, h, D] -> [B, T, H, D], all heads of this rank's tokens. Differentiable.

    The transpose of `seq_to_head`, and its inverse if ranges of heads do not overlap. A head that several ranks hold is
    summed over these ranks, in rank order and in float32 or wider, and its gradient is sent to all of them.

    Args:
        x: local tensor; or a DTensor, redistributed from `Shard(2)` on the axis to `Shard(1)`, and its gradient from
            `Shard(1)` to `Shard(2)`. Its heads are in the order in which `seq_to_head` returns them.
        axis: a 1-D mesh of U ranks.
        sizes: tokens of each rank; by default N / U.
        heads: one range of heads for each rank, in order and together covering all heads; by default h heads each.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all"; in backward as `seq_to_head`.

    Raises:
        ValueError: sizes, heads or placements do not fit. Raised before any communication.
    """
    mesh_axis = Axis.of(axis)
    if compat.is_dtensor(x):
        from armillary.core import dtensor  # DTensor's import takes seconds

        return dtensor.all_to_all(x, mesh_axis, (2, 1), sizes, heads)
    check_dims(x)
    sizes = _sizes(mesh_axis, sizes, x.shape[1])
    heads = cut(range(x.shape[2] * mesh_axis.size), mesh_axis.size) if heads is None else heads
    check_tokens("x", x, 1, sum(sizes), sizes)
    check_heads(heads, mesh_axis, None)  # this rank cannot know the number of all heads
    if x.shape[2] != len(heads[mesh_axis.rank]):
        raise ValueError(
            f"x {tuple(x.shape)} has {x.shape[2]} heads; rank {mesh_axis.rank} needs {heads[mesh_axis.rank]}"
        )
    return linear(x, start_head_to_seq, start_seq_to_head, mesh_axis, tuple(sizes), tuple(heads))


def all_gather(x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """Gathers the tokens of all ranks, in rank order: [B, T, ...] -> [B, N, ...]. Differentiable.

    The gradient of a token is summed over ranks, as in `reduce_scatter`.

    Args:
        x: local tensor; or a DTensor, redistributed from `Shard(dim)` on the axis to `Replicate()`. Its gradient is
            redistributed to `Shard(dim)`: from `Partial()`, or without communication from `Replicate()`.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; by default T on each.
        dim: dim of the tokens.

    Bytes sent: (C - 1) times the bytes of `x` padded to max(sizes) tokens, kind "all_gather"; in backward as
    `reduce_scatter`.

    Raises:
        ValueError: sizes or placements do not fit. Raised before any communication.
    """
    mesh_axis = Axis.of(axis)
    if compat.is_dtensor(x):
        from armillary.core import dtensor  # DTensor's import takes seconds

        return dtensor.all_gather(x, mesh_axis, sizes, dim)
    sizes = _sizes(mesh_axis, sizes, tokens_on(x, dim) * mesh_axis.size)
    if torch.compiler.is_compiling():
        return _trace(_traced_all_gather, x, mesh_axis, sizes, dim, sum(sizes))
    return linear(x, start_all_gather, start_reduce_scatter, mesh_axis, tuple(sizes), dim)


def reduce_scatter(x: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """Sums over ranks and scatters: [B, N, ...] on every rank -> [B, T, ...], this rank's tokens. Differentiable.

    The transpose of `all_gather`. Adds in rank order, in float32 or wider.

    Args:
        x: local tensor; or a DTensor, redistributed from `Partial()` on the axis to `Shard(dim)`, and its gradient from
            `Shard(dim)` to `Replicate()`: the addends of all ranks have the same gradient.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; by default N / C.
        dim: dim of the tokens.

    Bytes sent: the other ranks' tokens of `x`, kind "reduce_scatter"; in backward as `all_gather`.

    Raises:
        ValueError: sizes or placements do not fit. Raised before any communication.
    """
    mesh_axis = Axis.of(axis)
    if compat.is_dtensor(x):
        from armillary.core import dtensor  # DTensor's import takes seconds

        return dtensor.reduce_scatter(x, mesh_axis, sizes, dim)
    sizes = _sizes(mesh_axis, sizes, tokens_on(x, dim))
    if torch.compiler.is_compiling():
        return _trace(_traced_reduce_scatter, x, mesh_axis, sizes, dim, sizes[mesh_axis.rank])
    return linear(x, start_reduce_scatter, start_all_gather, mesh_axis, tuple(sizes), dim)


def all_reduce(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """Sums a tensor over ranks: [...] -> [...], bitwise equal on all ranks. Differentiable.

    The gradient is summed over ranks too, because the result of every rank depends on each rank's `x`. So if all ranks
    compute the same loss from the sum, each gets C times the gradient of its `x`. FSDP2 and DDP divide by C when they
    average gradients over these ranks.

    Args:
        x: local tensor, of the same shape and dtype on each rank.
        axis: a 1-D mesh of C ranks.

    Bytes sent: 2 (C - 1) / C times the bytes of `x`, kind "all_reduce"; in backward the same.

    Raises:
        ValueError: `x` is not a tensor, or it is a DTensor, whose `redistribute` sums `Partial()`.
    """
    if compat.is_dtensor(x):
        raise ValueError(f"x is a DTensor {x.placements}: redistribute it from Partial() to Replicate()")
    return linear(x, start_all_reduce, start_all_reduce, Axis.of(axis))


def merge_scatter(
    out: Tensor, lse: Tensor, axis: DeviceMesh | Axis, *, sizes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over each rank's keys into attention over all keys, for this rank's tokens. Differentiable.

    Rank r of the axis has computed attention of the same N queries over its own keys: out_r and lse_r. Each rank gets
    the merge over all ranks for its T tokens: out = sum_r w_r out_r, with w_r = exp(lse_r - lse) and lse = log sum_r
    exp(lse_r). A row without visible keys has out = 0, lse = -inf and zero gradients. This is step 4 of WallFacer
    (arXiv 2407.00611).

    Args:
        out: [B, N, H, Dv], a local tensor; or a DTensor, redistributed from `LogSumExpPartial(packed=False)` on the
            axis to `Shard(1)`. Its gradient is `Replicate`, torch's convention for partial tensors. (For out and lse
            packed into one DTensor, torch's `redistribute` computes the same.)
        lse: [B, N, H], float32 (float64 if `out` is); a local tensor, or a DTensor if `out` is one.
        axis: a 1-D mesh of C ranks.
        sizes: tokens of each rank; by default N / C.

    Returns:
        (out [B, T, H, Dv], lse [B, T, H]), in the dtypes of the inputs.

    Bytes sent, with T tokens on each rank: (C - 1) (B T H Dv e + 4 B T H), kind "reduce_scatter"; in backward
    (C - 1) (B T H Dv e + 8 B T H), kind "all_gather". In float64, 8 and 16 instead of 4 and 8.

    Raises:
        ValueError: shapes, dtypes, sizes or placements do not fit together. Raised before any communication.
    """
    mesh_axis = Axis.of(axis)
    if compat.is_dtensor(out) or compat.is_dtensor(lse):
        from armillary.core import logsumexp_partial

        return logsumexp_partial.merge_scatter(out, lse, mesh_axis, sizes)
    for name, x in (("out", out), ("lse", lse)):
        check_tensor(name, x)
    tokens = out.shape[1] if out.ndim == 4 else 0  # `merge` refuses other numbers of dims
    return merge(out, lse, mesh_axis, _sizes(mesh_axis, sizes, tokens))


def _sizes(axis: Axis, sizes: Sequence[int] | None, tokens: int) -> Sequence[int]:
    if sizes is None:
        if tokens % axis.size:
            raise ValueError(
                f"{tokens} tokens are not divisible by the {axis.size} ranks of axis {axis.name!r}; pass sizes="
            )
        return (tokens // axis.size,) * axis.size
    sizes = [integer("sizes", size, 0) for size in sizes]
    if len(sizes) != axis.size:
        raise ValueError(f"sizes {tuple(sizes)}: one for each of the {axis.size} ranks of axis {axis.name!r} is needed")
    return sizes


def _run_all_gather(x: Tensor, dim: int, axis: Axis, *sizes: int) -> Tensor:
    return start_all_gather(x, axis, sizes, dim).wait()


def _run_reduce_scatter(x: Tensor, dim: int, axis: Axis, *sizes: int) -> Tensor:
    return start_reduce_scatter(x, axis, sizes, dim).wait()


_traced_all_gather = define_linear("all_gather", _run_all_gather, _run_reduce_scatter)
_traced_reduce_scatter = define_linear("reduce_scatter", _run_reduce_scatter, _run_all_gather)


def _trace(op: Callable[..., Tensor], x: Tensor, axis: Axis, sizes: Sequence[int], dim: int, tokens: int) -> Tensor:
    # `tokens` is the size of the result on `dim`.
    return x if axis.size == 1 else op(x, dim, tokens, traced_axis(axis), *sizes)
