"""Collectives of decoding, in which all ranks of a method run the same tokens.

Each runs along one axis of the method after the other, innermost first. So no process group over all axes is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from armillary.attention import Method
from armillary.core import Axis, accumulation_dtype, merge_, start_all_gather


def axes_of(method: Method) -> tuple[Axis, ...]:
    """Returns the axes whose ranks share the sequence, outermost first. Along the last axis, shard numbers rise by 1.

    Raises:
        ValueError: the sizes of the axes, which are read from the methods' attribute `axis`, do not multiply to the
            number of shards.
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
    """Returns x [B, 1, ...] of the rank with shard `owner` on all ranks.

    Args:
        x: [B, 1, ...] on the owner, [B, 0, ...] on other ranks.
        owner: index of the owner's shard.
        shard: index of this rank's shard.
        axes: axes of the method, outermost first.

    Bytes sent: at most (P - 1) B ... e, kind "all_gather".
    """
    for axis in reversed(axes):
        # Along this axis, `shard % axis.size` is this rank's coordinate; the quotient numbers the groups of ranks that
        # share their other coordinates. Only the owner's group has x.
        group, owner_group = shard // axis.size, owner // axis.size
        if group == owner_group:
            sizes = [int(rank == owner % axis.size) for rank in range(axis.size)]
            x = start_all_gather(x, axis, sizes).wait()
        shard, owner = group, owner_group  # along the next axis, each group is one rank
    return x


def merge_partial_attention(out: Tensor, lse: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Merges one token's partial attention of all ranks, each over its own keys. The result is bitwise equal on all.

    Merges in rank order, in float32 (float64 for float64). A rank on which the token sees no keys has out = 0 and
    lse = -inf, and changes nothing.

    Args:
        out: [B, 1, H, D].
        lse: [B, 1, H] in the accumulation dtype.
        axes: axes of the method, outermost first.

    Returns:
        out [B, 1, H, D], in its dtype.

    Bytes sent: at most (P - 1) B H (D e + 4) (8 instead of 4 in float64), kind "all_gather". Along the second axis,
    results that are merged along the first axis are sent, in float32, once instead of U times.
    """
    dtype = out.dtype
    for axis in reversed(axes):
        if axis.size > 1:
            out, lse = _merge_along_axis(out, lse, axis)
    return out.to(dtype)


def _merge_along_axis(out: Tensor, lse: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) over the keys of all ranks on this axis, in the accumulation dtype."""
    gathers = [start_all_gather(x, axis, [1] * axis.size) for x in (out, lse)]
    outs, lses = (gather.wait().split(1, dim=1) for gather in gathers)
    merged_out = outs[0].to(accumulation_dtype(out.dtype), copy=True)
    merged_lse = lses[0].clone(memory_format=torch.contiguous_format)
    for rank_out, rank_lse in zip(outs[1:], lses[1:], strict=True):
        merge_(merged_out, merged_lse, rank_out, rank_lse)
    return merged_out, merged_lse
