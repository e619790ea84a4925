"""The functions of `collectives.differentiable` for DTensors.

Each checks the placements of its arguments, runs on local tensors and returns DTensors with explicit placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.all_to_all import start_head_to_seq, start_seq_to_head
from armillary.core.collectives.autograd import check_dims, check_heads, linear, merge
from armillary.core.collectives.collective import tokens_on
from armillary.core.collectives.reduce_scatter import start_reduce_scatter
from armillary.core.logsumexp_partial import LogSumExpPartial
from armillary.core.mesh import Axis
from armillary.core.observe.ledger import phase
from armillary.core.placements import (
    check_chunks,
    check_innermost,
    check_other_axes,
    check_placement,
    chunk_sizes,
    describe,
    dtensor_like,
    local_of,
    mesh_dim,
    outer_length,
)


def seq_to_head(x: DTensor, axis: Axis, sizes: Sequence[int] | None, heads: Sequence[range] | None) -> DTensor:
    """Redistributes from `Shard(1)` on the axis to `Shard(2)`."""
    return _all_to_all(x, axis, Shard(1), Shard(2), sizes, heads)


def head_to_seq(x: DTensor, axis: Axis, sizes: Sequence[int] | None, heads: Sequence[range] | None) -> DTensor:
    """Redistributes from `Shard(2)` on the axis to `Shard(1)`."""
    return _all_to_all(x, axis, Shard(2), Shard(1), sizes, heads)


def all_gather(x: DTensor, axis: Axis, sizes: Sequence[int] | None, dim: int) -> Tensor:
    """Redistributes from `Shard(dim)` on the axis to `Replicate()`."""
    axis_dim, sizes = _tokens("x", x, axis, Shard(dim), dim, sizes)
    return cast(Tensor, _AllGather.apply(x, axis, sizes, dim, axis_dim))


def reduce_scatter(x: DTensor, axis: Axis, sizes: Sequence[int] | None, dim: int) -> DTensor:
    """Redistributes from `Partial()` on the axis to `Shard(dim)`."""
    axis_dim, sizes = _tokens("x", x, axis, Partial(), dim, sizes)
    local = linear(local_of(x), start_reduce_scatter, start_all_gather, axis, sizes, dim)
    return dtensor_like(x, local, x.shape, {axis_dim: Shard(dim)})


def merge_scatter(out: DTensor, lse: DTensor, axis: Axis, sizes: Sequence[int] | None) -> tuple[DTensor, DTensor]:
    """Redistributes out and lse from `LogSumExpPartial(packed=False)` on the axis to `Shard(1)`."""
    if out.device_mesh != lse.device_mesh or out.placements != lse.placements:
        raise ValueError(f"out is {describe(out)}, lse {describe(lse)}; both need the same placements")
    axis_dim, sizes = _tokens("out", out, axis, LogSumExpPartial(packed=False), 1, sizes)
    merged_locals = merge(local_of(out), local_of(lse), axis, sizes)
    shard: dict[int, Placement] = {axis_dim: Shard(1)}
    return dtensor_like(out, merged_locals[0], out.shape, shard), dtensor_like(lse, merged_locals[1], lse.shape, shard)


def on_local_tokens(
    x: DTensor, function: Callable[[Tensor], Tensor], axis: Axis, dim: int, sizes: Sequence[Sequence[int]]
) -> DTensor:
    """Applies a function to the local tensor of `x`, whose tokens stay `Shard(dim)` on the axis.

    Args:
        sizes: shard sizes before and after the function. Both must be DTensor's chunk sizes.
    """
    axis_dims = [_tokens("x", x, axis, Shard(dim), dim, shards)[0] for shards in sizes]
    return dtensor_like(x, function(local_of(x)), x.shape, {axis_dims[0]: Shard(dim)})


class _AllGather(torch.autograd.Function):
    """`all_gather` of a DTensor. Backward sums a gradient that is `Partial` on the axis; `Replicate` needs no sends."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, axis: Axis, sizes: tuple[int, ...], dim: int, axis_dim: int) -> DTensor:
        ctx.call, ctx.placements = (axis, sizes, dim, axis_dim), x.placements
        local = start_all_gather(x.to_local(), axis, sizes, dim).wait()
        return dtensor_like(x, local, x.shape, {axis_dim: Replicate()})

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (axis, sizes, dim, axis_dim) = grads, ctx.call
        # torch redistributes the gradient on the other axes. We sum it over this axis, so that the ledger counts that.
        target = list(ctx.placements)
        if grad.placements[axis_dim] == Partial():
            target[axis_dim] = Partial()
        local = grad.redistribute(placements=target).to_local()
        if target[axis_dim] == Partial():
            with phase("backward"):
                local = start_reduce_scatter(local, axis, sizes, dim).wait()
        return dtensor_like(grad, local, grad.shape, dict(enumerate(ctx.placements))), None, None, None, None


def _all_to_all(
    x: DTensor, axis: Axis, source: Shard, target: Shard, sizes: Sequence[int] | None, heads: Sequence[range] | None
) -> DTensor:
    """Redistributes `x` by an all-to-all from placement `source` on the axis to `target`."""
    check_dims(x)
    axis_dim = mesh_dim(x, axis)
    check_placement("x", x, axis_dim, source)
    check_other_axes("x", x, axis_dim)
    check_innermost("x", x, axis_dim, 1)
    tokens = chunk_sizes(outer_length(x, 1, axis_dim), axis.size)
    check_chunks("sizes", tokens if sizes is None else sizes, tokens, axis.name)
    ranges = _heads(x, axis, axis_dim)
    head_ranges = ranges if heads is None else heads
    check_chunks(
        "heads", [len(head_range) for head_range in head_ranges], [len(head_range) for head_range in ranges], axis.name
    )
    check_heads(head_ranges, axis, ranges[-1].stop)
    starts = start_seq_to_head, start_head_to_seq
    local = linear(local_of(x), *(starts if source == Shard(1) else starts[::-1]), axis, tokens, ranges)
    return dtensor_like(x, local, x.shape, {axis_dim: target})


def _heads(x: DTensor, axis: Axis, axis_dim: int) -> tuple[range, ...]:
    """Returns the range of heads of each rank of the axis. Heads count within this rank's shard on the outer axes."""
    outer_heads = outer_length(x, 2, axis_dim)
    inner_ranks = prod(
        x.device_mesh.size(i) for i in range(axis_dim + 1, x.device_mesh.ndim) if x.placements[i] == Shard(2)
    )
    if inner_ranks > 1 and outer_heads % (inner_ranks * axis.size):
        raise ValueError(
            f"{outer_heads} heads of {describe(x)} cannot be cut evenly over {axis.size} ranks of axis {axis.name!r} "
            f"and {inner_ranks} inside it; give a number of heads that {axis.size * inner_ranks} divides, or pass "
            "local tensors"
        )
    ends = [0]
    # In the local tensor, axes inside this one have cut the heads already. This axis cuts the local heads.
    for size in chunk_sizes(outer_heads // inner_ranks, axis.size):
        ends.append(ends[-1] + size)
    return tuple(range(a, b) for a, b in pairwise(ends))


def _tokens(
    name: str, x: DTensor, axis: Axis, placement: Placement, dim: int, sizes: Sequence[int] | None
) -> tuple[int, tuple[int, ...]]:
    """Checks the placements of `x`. Returns (mesh dim of the axis, number of tokens on each of its ranks).

    Args:
        placement: the placement that `x` must have on the axis.
        dim: dim of the tokens.
        sizes: the tokens of each rank that the caller passed, which must be DTensor's chunk sizes; None for these.
    """
    tokens_on(x, dim)
    axis_dim = mesh_dim(x, axis)
    check_placement(name, x, axis_dim, placement)
    check_other_axes(name, x, axis_dim)
    check_innermost(name, x, axis_dim, dim)
    expected = chunk_sizes(outer_length(x, dim, axis_dim), axis.size)
    check_chunks("sizes", expected if sizes is None else sizes, expected, axis.name)
    return axis_dim, expected
