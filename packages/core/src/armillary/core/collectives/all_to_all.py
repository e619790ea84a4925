"""Turning sequence shards into head shards and back, along one axis (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Heads are given as one range per rank, so that nothing needs to divide anything: ranks may work on different numbers of
heads, and ranges may overlap, as those of key/value heads do when there are fewer of them than ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, pack, start_parts
from armillary.core.mesh import Axis


@dataclass(frozen=True)
class PackedHeads:
    """Heads [B, T, H, D] of this rank's tokens, copied in the order of sending: what they were cut from may go.

    Args:
        parts: [B, T, h, D] for each rank, views of `flat`.
        flat: all of them, one after another.
    """

    parts: tuple[Tensor, ...]
    flat: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> PackedHeads:
        """The heads [B, T, h, D] for each rank; copied, unless there is one rank only."""
        if len(parts) == 1:
            return cls(tuple(parts), parts[0])
        flat = pack(parts)
        views = zip(flat.split([part.numel() for part in parts]), parts, strict=True)
        return cls(tuple(view.view(part.shape) for view, part in views), flat)

    @classmethod
    def cut(cls, x: Tensor, heads: Sequence[range]) -> PackedHeads:
        """The heads of `x` [B, T, H, D] that each rank works on."""
        return cls.of([x[:, :, part.start : part.stop] for part in heads])


def start_seq_to_head(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """[B, T, H, D], all heads of this rank's tokens -> [B, sum(sizes), h, D], this rank's heads of all tokens.

    Args:
        x: local; T is `sizes[axis.rank]`.
        sizes: tokens of each rank of the axis; the result holds them in rank order.
        heads: the heads that each rank of the axis works on; h is `len(heads[axis.rank])`.

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all".
    """
    return start_packed_to_head(PackedHeads.cut(x, heads), axis, sizes)


def start_packed_to_head(packed: PackedHeads, axis: Axis, sizes: Sequence[int]) -> Collective[Tensor]:
    """As `start_seq_to_head`, from heads that are packed already."""
    batch, _, mine, dim = packed.parts[axis.rank].shape
    shapes = [(batch, size, mine, dim) for size in sizes]
    moving = start_parts(axis, packed.parts, shapes, "all_to_all", packed.flat)

    def assemble() -> Tensor:
        if batch == 1 and moving.works:  # then they lie one after another already
            return moving.buffer.view(1, sum(sizes), mine, dim)
        return torch.cat(list(moving.received), dim=1) if moving.works else moving.received[0]

    return Collective(axis, (moving.sent,), moving.works, assemble)


def start_head_to_seq(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """[B, sum(sizes), h, D], this rank's heads of all tokens -> [B, T, H, D], all heads of this rank's tokens.

    The inverse of `start_seq_to_head`, and its transpose: a head that several ranks worked on is summed, in float32 at
    least and in rank order. Arguments as there.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all".
    """
    parts = start_head_to_parts(x, axis, sizes, heads)
    return Collective(axis, parts.buffers, parts.works, lambda: _sum_heads(parts.assemble(), heads))


def start_head_to_parts(
    x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]
) -> Collective[tuple[Tensor, ...]]:
    """As `start_head_to_seq`, but gives [B, T, h, D] of each rank's heads instead of putting them together."""
    parts = x.split(list(sizes), dim=1)
    shapes = [(x.shape[0], sizes[axis.rank], len(part), x.shape[3]) for part in heads]
    packed = x.contiguous().view(-1) if x.shape[0] == 1 else None
    moving = start_parts(axis, parts, shapes, "all_to_all", packed)
    return Collective(axis, (moving.sent,), moving.works, lambda: moving.received)


def _sum_heads(received: Sequence[Tensor], heads: Sequence[range]) -> Tensor:
    """Puts each rank's heads in their places; where several hold one head, adds."""
    count = max(part.stop for part in heads)
    if len(received) == 1:
        return received[0]
    if sum(map(len, heads)) == count:
        return torch.cat(list(received), dim=2)
    first = received[0]
    whole = first.new_zeros((*first.shape[:2], count, first.shape[3]), dtype=accumulation_dtype(first.dtype))
    for part, place in zip(received, heads, strict=True):
        whole[:, :, place.start : place.stop] += part
    return whole.to(first.dtype)
