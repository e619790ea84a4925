"""All ranks' tokens on every rank of an axis: asynchronous, on local tensors, without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.collectives.collective import Collective, check_tokens
from armillary.core.mesh import Axis
from armillary.core.observe.trace import record, watched


def start_all_gather(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """[B, T, ...], this rank's tokens -> [B, sum(sizes), ...], those of all ranks, in rank order.

    Args:
        x: local; dim `dim` is `sizes[axis.rank]`. Must not be written to before `wait`.
        sizes: tokens of each rank of the axis. Where they differ, every rank sends as many as the longest has.
        dim: of the tokens.

    Bytes sent: (C - 1) times those of `x` padded to max(sizes), C = axis.size; kind "all_gather".
    """
    check_tokens("x", x, dim, sizes[axis.rank], sizes)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    shape = [*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]]
    sent = x.contiguous() if x.shape[dim] == max(sizes) else _padded(x, shape, dim)
    buffer = x.new_empty((axis.size, *shape))
    under_way = record(axis.name, "all_gather", (axis.size - 1) * sent.nbytes, axis.size - 1)
    work = compat.all_gather_single(buffer.view(-1), sent.view(-1), axis.group)

    def assemble() -> Tensor:
        if prod(shape[:dim]) == 1 and min(sizes) == max(sizes):
            return buffer.view(*shape[:dim], sum(sizes), *shape[dim + 1 :])
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(buffer, sizes, strict=True)], dim)

    return Collective(axis, (sent, buffer), watched([work], under_way), assemble)


def _padded(x: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """`x` at the beginning of a tensor of `shape`; the rest is not written."""
    padded = x.new_empty(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded
