"""Collectives of tokens along one axis: asynchronous, on local tensors, without autograd.

    start_all_gather       [B, T, ...] -> [B, N, ...]          the tokens of all ranks
    start_reduce_scatter   [B, N, ...] -> [B, T, ...]          its transpose: this rank's tokens, summed over ranks
    start_scatter_parts    [B, N, ...] -> C times [B, T, ...]  this rank's tokens from each rank, without the sum
    start_all_reduce       [...] -> [...]                      the sum over ranks

The reduce-scatter is an all-to-all whose receiver adds. With the backend's we could not choose the order and the
precision of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core import compat
from armillary.core.collectives.collective import Collective, accumulation_dtype, check_tokens, pack, start_parts
from armillary.core.mesh import Axis
from armillary.core.observe import end_span_on_wait, record
from armillary.core.validation import check_tensor


def start_all_gather(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """Starts to gather the tokens of all ranks, in rank order: [B, T, ...] -> [B, sum(sizes), ...].

    Args:
        x: local tensor; its size on `dim` is `sizes[axis.rank]`. Must not be written to before `wait`.
        axis: the axis to gather over, of C ranks.
        sizes: tokens of each rank. Every rank sends max(sizes) tokens; ranks with fewer tokens pad them.
        dim: dim of the tokens.

    Bytes sent: (C - 1) times the bytes of `x` padded to max(sizes), kind "all_gather".
    """
    check_tokens("x", x, dim, sizes[axis.rank], sizes)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    shape = [*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]]
    if x.shape[dim] == max(sizes):
        send_buffer = x.contiguous()
    else:  # pads with uninitialized values, which `assemble` drops
        send_buffer = x.new_empty(shape)
        send_buffer.narrow(dim, 0, x.shape[dim]).copy_(x)
    buffer = x.new_empty((axis.size, *shape))
    trace_record = record(axis.name, "all_gather", (axis.size - 1) * send_buffer.nbytes, axis.size - 1)
    work = compat.all_gather_single(buffer.view(-1), send_buffer.view(-1), axis.group)

    def assemble() -> Tensor:
        # If all dims before the tokens have size 1, and no rank has padding, the buffer is the result already.
        if prod(shape[:dim]) == 1 and min(sizes) == max(sizes):
            return buffer.view(*shape[:dim], sum(sizes), *shape[dim + 1 :])
        return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(buffer, sizes, strict=True)], dim)

    return Collective(axis, (send_buffer, buffer), end_span_on_wait([work], trace_record), assemble)


def start_reduce_scatter(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """Starts to sum over all ranks: [B, sum(sizes), ...] on every rank -> [B, T, ...], the sums of this rank's tokens.

    The transpose of `start_all_gather`, with the same `axis`, `sizes` and `dim`. Each rank adds the tokens that it
    receives in rank order, in float32 or wider, and then rounds once to the dtype of `x`. So every run has the same
    bits.

    Bytes sent: the other ranks' tokens in `x`, kind "reduce_scatter".
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    send_buffer, addends, works = start_scatter(x, axis, sizes, dim)

    def assemble() -> Tensor:
        if axis.size == 1:
            return x
        total = addends[0].to(accumulation_dtype(x.dtype), copy=True)
        # Not one `sum(0)`: from five ranks on, torch's order of addition depends on the shape and on the element's
        # index, so that the bits of a token would depend on the length of its shard.
        for addend in addends[1:]:
            total += addend
        return total.to(x.dtype)

    return Collective(axis, (send_buffer, *addends), works, assemble)


def start_scatter_parts(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[tuple[Tensor, ...]]:
    """Starts the exchange of `start_reduce_scatter` without the sum.

    The result has one tensor [B, T, ...] from each rank, in rank order: that rank's values for this rank's tokens. For
    reductions other than sums, such as log-sum-exp. Sends as many bytes as `start_reduce_scatter`.
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    send_buffer, shards, works = start_scatter(x, axis, sizes, dim)
    return Collective(axis, (send_buffer, *shards), works, lambda: shards)


def start_scatter(
    x: Tensor, axis: Axis, sizes: Sequence[int], dim: int
) -> tuple[Tensor, tuple[Tensor, ...], tuple[dist.Work, ...]]:
    """Starts to send each rank its tokens of `x`. Returns (sent tensor, tokens received from each rank, works)."""
    if axis.size == 1:
        return x, (x,), ()
    outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    # If all dims before the tokens have size 1, each rank's tokens are contiguous already.
    values = x.contiguous() if outer == 1 else pack(x.split_with_sizes(list(sizes), dim))
    shape = (*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :])
    send, receive = [outer * size * inner for size in sizes], [prod(shape)] * axis.size
    send_buffer, buffer, works = start_parts(axis, values, send, receive, "reduce_scatter")
    return send_buffer, buffer.view(axis.size, *shape).unbind(0), works


def start_all_reduce(x: Tensor, axis: Axis) -> Collective[Tensor]:
    """Starts to sum a tensor over all ranks; every rank gets the same bits.

    Args:
        x: local tensor, of the same shape and dtype on each rank.
        axis: the axis to sum over, of C ranks.

    Bytes sent: 2 (C - 1) / C times the bytes of `x`, kind "all_reduce", as in a ring: a reduce-scatter of C - 1 steps,
    then an all-gather of C - 1 steps. Other algorithms of the backend may send other amounts.
    """
    check_tensor("x", x)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    total = x.clone(memory_format=torch.contiguous_format)  # torch reduces in place
    steps = 2 * (axis.size - 1)
    traced = record(axis.name, "all_reduce", steps * x.nbytes // axis.size, steps)
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    assert work is not None
    return Collective(axis, (total,), end_span_on_wait([work], traced), lambda: total)
