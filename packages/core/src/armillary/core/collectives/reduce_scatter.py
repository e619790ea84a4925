"""Reduce-scatter of tokens along one axis, summed or unsummed: asynchronous, on local tensors, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor

from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, check_tokens, pack, start_parts
from armillary.core.mesh import Axis


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
    """Starts to send each rank its tokens of `x`. Returns (sent tensor, tokens received from each rank, works).

    Uses an all-to-all: with the backend's reduce-scatter we could not choose the order and the precision of the sum.
    """
    if axis.size == 1:
        return x, (x,), ()
    outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    # If all dims before the tokens have size 1, each rank's tokens are contiguous already.
    values = x.contiguous() if outer == 1 else pack(x.split_with_sizes(list(sizes), dim))
    shape = (*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :])
    send, receive = [outer * size * inner for size in sizes], [prod(shape)] * axis.size
    send_buffer, buffer, works = start_parts(axis, values, send, receive, "reduce_scatter")
    return send_buffer, buffer.view(axis.size, *shape).unbind(0), works
