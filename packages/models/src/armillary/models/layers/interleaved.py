"""Tokens of R ranks, interleaved: rank r holds tokens r, r + R, r + 2R, ... of T.

Every rank has n = ceil(T / R) tokens. If R does not divide T, the last token of some ranks is padding, initially zero.
A chunk of consecutive tokens of the sequence, from a multiple of R to another, is a chunk of consecutive tokens on
every rank, so that a function in chunks (`token_functions.py`) gathers and reduces one chunk after the other.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, all_gather, reduce_scatter


def all_gather_interleaved(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """Gathers the tokens of all ranks: [B, n, ...] -> [B, n R, ...]. Backward is `reduce_scatter_interleaved`.

    Bytes sent: (R - 1) times the bytes of `x`, kind "all_gather"; backward as `reduce_scatter_interleaved`.
    """
    return all_gather(x.unsqueeze(2), axis, dim=2).flatten(1, 2)


def reduce_scatter_interleaved(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """Sums x over ranks and returns this rank's tokens: [B, T, ...] -> [B, n, ...].

    Backward is `all_gather_interleaved`. Adds in rank order, in float32 or wider.

    Bytes sent: (R - 1) / R times the bytes of the padded `x`, kind "reduce_scatter"; backward as
    `all_gather_interleaved`.
    """
    mesh_axis = Axis.of(axis)
    return reduce_scatter(pad_to_multiple(x, mesh_axis.size).unflatten(1, (-1, mesh_axis.size)), axis, dim=2).squeeze(2)


def interleaved_shard(x: Tensor, axis: DeviceMesh | Axis) -> Tensor:
    """Returns this rank's tokens [B, n, ...] of x [B, T, ...], which is the same on every rank. No communication."""
    mesh_axis = Axis.of(axis)
    return pad_to_multiple(x, mesh_axis.size)[:, mesh_axis.rank :: mesh_axis.size]


def pad_to_multiple(x: Tensor, multiple: int, value: float = 0) -> Tensor:
    """Returns x [B, T, ...], padded with `value` if T is not a multiple of `multiple`."""
    padding = -x.shape[1] % multiple
    return F.pad(x, (*[0, 0] * (x.ndim - 2), 0, padding), value=value) if padding else x
