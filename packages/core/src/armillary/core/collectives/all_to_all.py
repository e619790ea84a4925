"""Turning sequence shards into head shards and back, along one axis (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Heads are given as one range per rank, so that nothing needs to divide anything: ranks may work on different numbers of
heads, and ranges may overlap, as those of key/value heads do when there are fewer of them than ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, pack, start_parts
from armillary.core.mesh import Axis


class PackedHeads(NamedTuple):
    """Heads [B, T, H, D] of this rank's tokens, copied in the order of sending: what they were cut from may go.

    Args:
        flat: the heads [B, T, h, D] for each rank, one after another. With one rank no copy, [B, T, H, D].
        batch, tokens, dim: B, T, D.
        counts: h of each rank.
    """

    flat: Tensor
    batch: int
    tokens: int
    dim: int
    counts: tuple[int, ...]

    @classmethod
    def cut(cls, x: Tensor, heads: Sequence[range]) -> PackedHeads:
        """The heads of `x` [B, T, H, D] that each rank works on."""
        batch, tokens, count, dim = x.shape
        counts, each = _even(tuple(heads), count)
        if len(counts) == 1:
            flat = x
        elif each:  # in one piece: such a copy costs the host a tenth of what one for each rank does
            flat = x.view(batch, tokens, len(counts), each, dim).permute(2, 0, 1, 3, 4)
            flat = flat.clone(memory_format=torch.contiguous_format)
        else:
            flat = pack([x[:, :, part.start : part.stop] for part in heads])
        return cls(flat, batch, tokens, dim, counts)


@lru_cache(maxsize=256)
def _even(heads: tuple[range, ...], count: int | None = None) -> tuple[tuple[int, ...], int]:
    """(heads of each rank, how many all have where these are side by side and all of `count` heads; else 0)."""
    counts, each = tuple(map(len, heads)), len(heads[0])
    even = all(part == range(rank * each, (rank + 1) * each) for rank, part in enumerate(heads))
    return counts, each if even and count in (None, each * len(heads)) else 0


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
    flat, batch, tokens, dim, counts = packed
    if axis.size == 1:
        return Collective(axis, (flat,), (), lambda: flat)
    head, mine = batch * tokens * dim, counts[axis.rank]
    token = batch * mine * dim
    send, receive = [head * count for count in counts], [token * size for size in sizes]
    sent, buffer, works = start_parts(axis, flat, send, receive, "all_to_all")

    def assemble() -> Tensor:
        if batch == 1:  # then they lie one after another already
            return buffer.view(1, sum(sizes), mine, dim)
        parts = zip(buffer.split_with_sizes(receive), sizes, strict=True)
        return torch.cat([part.view(batch, size, mine, dim) for part, size in parts], dim=1)

    return Collective(axis, (sent,), works, assemble)


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
    """As `start_head_to_seq`, but gives heads [B, T, h, D] in rank order instead of putting them together.

    One part for each rank; where all have one head, one with all of them, a view.
    """
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: (x,))
    batch, _, mine, dim = x.shape
    counts, each = _even(tuple(heads))
    packed = x.contiguous() if batch == 1 else pack(x.split_with_sizes(list(sizes), 1))
    token, shape = batch * mine * dim, (batch, sizes[axis.rank])
    receive = [batch * shape[1] * dim * count for count in counts]
    sent, buffer, works = start_parts(axis, packed, [token * size for size in sizes], receive, "all_to_all")

    def assemble() -> tuple[Tensor, ...]:
        if each == 1:
            return (buffer.view(len(counts), *shape, dim).permute(1, 2, 0, 3),)
        if each:
            return buffer.view(len(counts), *shape, each, dim).unbind(0)
        parts = zip(buffer.split_with_sizes(receive), counts, strict=True)
        return tuple(part.view(*shape, count, dim) for part, count in parts)

    return Collective(axis, (sent,), works, assemble)


def _sum_heads(received: Sequence[Tensor], heads: Sequence[range]) -> Tensor:
    """Puts each rank's heads in their places; where several hold one head, adds."""
    if len(received) == 1:
        return received[0]
    count = max(part.stop for part in heads)
    if sum(map(len, heads)) == count:
        return torch.cat(list(received), dim=2)
    first = received[0]
    whole = first.new_zeros((*first.shape[:2], count, first.shape[3]), dtype=accumulation_dtype(first.dtype))
    for part, place in zip(received, heads, strict=True):
        whole[:, :, place.start : place.stop] += part
    return whole.to(first.dtype)
