"""Tokens dealt out to the ranks of an axis like cards: of T tokens, rank r of R has r, r + R, r + 2R, ...

So some consecutive tokens, of a multiple of R, are some consecutive tokens of every rank: what is done piece by piece
can be gathered and summed piece by piece too. Tensor parallelism keeps its residual stream like this.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core.mesh import Axis
from armillary.core.primitives import gather_seq, scatter_sum


def gather_dealt(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """[B, T / R, ...], this rank's tokens -> [B, T, ...], those of all ranks. Differentiable: sums over the ranks.

    Bytes sent: (R - 1) times those of `x`, kind "all_gather"; backward as `sum_dealt` forward.
    """
    return gather_seq(x.unsqueeze(2), axis, dim=2).flatten(1, 2)


def sum_dealt(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """[B, T, ...] on every rank -> [B, T / R, ...], this rank's tokens of the sum over ranks. Differentiable: gathers.

    Sums in rank order and in float32 at least.

    Bytes sent: (R - 1) / R times those of `x`, kind "reduce_scatter"; backward as `gather_dealt` forward.

    Raises:
        ValueError: R does not divide T. Raised before any communication.
    """
    along = Axis.of(axis)
    if x.shape[1] % along.size:
        raise ValueError(f"{x.shape[1]} tokens cannot be dealt out to {along.size} ranks of axis {along.name!r} evenly")
    return scatter_sum(x.unflatten(1, (-1, along.size)), axis, dim=2).squeeze(2)


def own_dealt(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """[B, T, ...], the same on every rank -> [B, T / R, ...], this rank's tokens of it. Sends nothing."""
    along = Axis.of(axis)
    return x[:, along.rank :: along.size]
