"""All-gather of tokens along one axis: asynchronous, on local tensors, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.collectives.collective import Collective, check_tokens
from armillary.core.mesh import Axis
from armillary.core.observe import end_span_on_wait, record


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
