"""Interleaved shards of tokens: of T tokens, rank r of the R on an axis has r, r + R, r + 2R, ...

So some consecutive tokens, of a multiple of R, are some consecutive tokens of every rank: what is done piece by piece
can be gathered and summed piece by piece too. Tensor parallelism keeps its residual stream like this.

Every rank has n = ceil(T / R) tokens. Where R does not divide T, some ranks' last one is padding: zeros, at first.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core.collectives.differentiable import all_gather, reduce_scatter
from armillary.core.mesh import Axis


def all_gather_interleaved(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """[B, n, ...], this rank's tokens -> [B, n R, ...], those of all ranks. Differentiable: sums over the ranks.

    Bytes sent: (R - 1) times those of `x`, kind "all_gather"; backward as `reduce_scatter_interleaved` forward.
    """
    return all_gather(x.unsqueeze(2), axis, dim=2).flatten(1, 2)


def reduce_scatter_interleaved(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """[B, T, ...] on every rank -> [B, n, ...], this rank's tokens of the sum over ranks. Differentiable: gathers.

    Sums in rank order and in float32 at least.

    Bytes sent: (R - 1) / R times those of `x`, padded, kind "reduce_scatter"; backward as `all_gather_interleaved`
    forward.
    """
    along = Axis.of(axis)
    return reduce_scatter(pad_to_multiple(x, along.size).unflatten(1, (-1, along.size)), axis, dim=2).squeeze(2)


def interleaved_shard(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """[B, T, ...], the same on every rank -> [B, n, ...], this rank's tokens of it. Sends nothing."""
    along = Axis.of(axis)
    return pad_to_multiple(x, along.size)[:, along.rank :: along.size]


def pad_to_multiple(x: Tensor, multiple: int, value: float = 0) -> Tensor:
    """x [B, T, ...] with `value` behind its tokens, up to a multiple of so many; itself if it has that."""
    missing = -x.shape[1] % multiple
    return F.pad(x, (*[0, 0] * (x.ndim - 2), 0, missing), value=value) if missing else x
