"""Collectives on DTensors: placements are checked, the work is done on local tensors, results say how they lie."""

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
    check_others,
    check_placement,
    chunk_sizes,
    describe,
    dtensor_like,
    held_length,
    local_of,
    mesh_dim,
)


def seq_to_head(x: DTensor, axis: Axis, sizes: Sequence[int] | None, heads: Sequence[range] | None) -> DTensor:
    """From `Shard(1)` on the axis to `Shard(2)`."""
    return _turned(x, axis, Shard(1), Shard(2), sizes, heads)


def head_to_seq(x: DTensor, axis: Axis, sizes: Sequence[int] | None, heads: Sequence[range] | None) -> DTensor:
    """From `Shard(2)` on the axis to `Shard(1)`."""
    return _turned(x, axis, Shard(2), Shard(1), sizes, heads)


def all_gather(x: DTensor, axis: Axis, sizes: Sequence[int] | None, dim: int) -> Tensor:
    """From `Shard(dim)` on the axis to `Replicate`."""
    place, sizes = _tokens("x", x, axis, Shard(dim), dim, sizes)
    return cast(Tensor, _AllGather.apply(x, axis, sizes, dim, place))


def reduce_scatter(x: DTensor, axis: Axis, sizes: Sequence[int] | None, dim: int) -> DTensor:
    """From `Partial()` on the axis to `Shard(dim)`."""
    place, sizes = _tokens("x", x, axis, Partial(), dim, sizes)
    local = linear(local_of(x), start_reduce_scatter, start_all_gather, axis, sizes, dim)
    return dtensor_like(x, local, x.shape, {place: Shard(dim)})


def merge_scatter(out: DTensor, lse: DTensor, axis: Axis, sizes: Sequence[int] | None) -> tuple[DTensor, DTensor]:
    """From `LogSumExpPartial(packed=False)` on the axis to `Shard(1)`, both."""
    if out.device_mesh != lse.device_mesh or out.placements != lse.placements:
        raise ValueError(f"out is {describe(out)}, lse {describe(lse)}; both must be placed alike")
    place, sizes = _tokens("out", out, axis, LogSumExpPartial(packed=False), 1, sizes)
    parts = merge(local_of(out), local_of(lse), axis, sizes)
    shard: dict[int, Placement] = {place: Shard(1)}
    return dtensor_like(out, parts[0], out.shape, shard), dtensor_like(lse, parts[1], lse.shape, shard)


def on_local_tokens(
    x: DTensor, function: Callable[[Tensor], Tensor], axis: Axis, dim: int, sizes: Sequence[Sequence[int]]
) -> DTensor:
    """Calls a function of this rank's tokens, which stay `Shard(dim)` on the axis.

    Args:
        sizes: of shards before and after, which must be DTensor's own.
    """
    places = [_tokens("x", x, axis, Shard(dim), dim, shards)[0] for shards in sizes]
    return dtensor_like(x, function(local_of(x)), x.shape, {places[0]: Shard(dim)})


class _AllGather(torch.autograd.Function):
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


def _turned(
    x: DTensor, axis: Axis, before: Shard, after: Shard, sizes: Sequence[int] | None, heads: Sequence[range] | None
) -> DTensor:
    """Either all-to-all: from `before` on the axis to `after`."""
    check_dims(x)
    place = mesh_dim(x, axis)
    check_placement("x", x, place, before)
    check_others("x", x, place)
    check_innermost("x", x, place, 1)
    tokens = chunk_sizes(held_length(x, 1, place), axis.size)
    check_chunks("sizes", tokens if sizes is None else sizes, tokens, axis.name)
    ranges = _heads(x, axis, place)
    found = ranges if heads is None else heads
    check_chunks("heads", [len(part) for part in found], [len(part) for part in ranges], axis.name)
    check_heads(found, axis, ranges[-1].stop)
    starts = start_seq_to_head, start_head_to_seq
    local = linear(local_of(x), *(starts if before == Shard(1) else starts[::-1]), axis, tokens, ranges)
    return dtensor_like(x, local, x.shape, {place: after})


def _heads(x: DTensor, axis: Axis, place: int) -> tuple[range, ...]:
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


def _tokens(
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
