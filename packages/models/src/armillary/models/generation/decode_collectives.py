"""Collectives of decoding, where all ranks of a method run the same tokens.

They run along one axis after the other, innermost first, so that no process group is created.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from armillary.attention import Method
from armillary.core import Axis, accumulation_dtype, merge_, start_all_gather


def axes_of(method: Method) -> tuple[Axis, ...]:
    """Returns the axes whose ranks share the sequence, outermost first: shard numbers count fastest along the last one.

    Raises:
        ValueError: the method does not have its axes in `axis`, as armillary's do.
    """
    outer = () if method.sequence_method is method else axes_of(method.sequence_method)
    own_axis: Axis | None = getattr(method, "axis", None)
    axes = outer if own_axis is None else (*outer, own_axis)
    ranks = prod(axis.size for axis in axes)
    if ranks != method.shards:
        name = type(method).__name__
        raise ValueError(f"{name} has {method.shards} shards and axes of {ranks} ranks; it must have its axis as .axis")
    return axes


def broadcast_from_shard(x: Tensor, owner: int, shard: int, axes: Sequence[Axis]) -> Tensor:
    """Sends x [B, 1, ...] of the shard `owner` to the ranks of all shards.

    Args:
        x: [B, 1, ...] where `shard` is the owner; elsewhere [B, 0, ...].
        shard: index of this rank's shard.
        axes: axes of the method, outermost first.

    Bytes sent: at most (P - 1) B ... e, kind "all_gather".
    """
    for axis in reversed(axes):
        row, owners_row = shard // axis.size, owner // axis.size
        if row == owners_row:
            sizes = [int(rank == owner % axis.size) for rank in range(axis.size)]
            x = start_all_gather(x, axis, sizes).wait()
        shard, owner = row, owners_row
    return x


def merge_partial_attention(out: Tensor, lse: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Merges one token's attention over each rank's keys, with the same bits on every rank.

    Merges in rank order, in float32 (float64 for float64). A rank that sees no keys, with out = 0 and lse = -inf,
    counts nothing.

    Args:
        out: [B, 1, H, D], lse: [B, 1, H] in the accumulation dtype.
        axes: axes of the method, outermost first.

    Returns:
        out [B, 1, H, D], in its dtype.

    Bytes sent: at most (P - 1) B H (D e + 4), or 8 in float64; kind "all_gather". Results merged along the inner axis
    travel in float32, once instead of U times.
    """
    dtype = out.dtype
    for axis in reversed(axes):
        if axis.size > 1:
            out, lse = _merge_along_axis(out, lse, axis)
    return out.to(dtype)


def _merge_along_axis(out: Tensor, lse: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) over the keys of this axis' ranks, in the accumulation dtype."""
    moving = [start_all_gather(x, axis, [1] * axis.size) for x in (out, lse)]
    outs, lses = (move.wait().split(1, dim=1) for move in moving)
    total, total_lse = (
        outs[0].to(accumulation_dtype(out.dtype), copy=True),
        lses[0].clone(memory_format=torch.contiguous_format),
    )
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        merge_(total, total_lse, part, part_lse)
    return total, total_lse
