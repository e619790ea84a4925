"""Turning sequence shards into head shards and back, along one axis (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Heads are given as one range per rank, so that nothing needs to divide anything: ranks may work on different numbers of
heads, and ranges may overlap, as those of key/value heads do when there are fewer of them than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from armillary.core.collective import Collective, start_parts, wide
from armillary.core.mesh import Axis


def start_seq_to_head(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """[B, T, H, D], all heads of this rank's tokens -> [B, sum(sizes), h, D], this rank's heads of all tokens.

    Args:
        x: local; T is `sizes[axis.rank]`.
        sizes: tokens of each rank of the axis; the result holds them in rank order.
        heads: the heads that each rank of the axis works on; h is `len(heads[axis.rank])`.

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all".
    """
    mine = len(heads[axis.rank])
    parts = [x[:, :, part.start : part.stop] for part in heads]
    shapes = [(x.shape[0], size, mine, x.shape[3]) for size in sizes]
    return _start(axis, parts, shapes, lambda received: torch.cat(list(received), dim=1))


def start_head_to_seq(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """[B, sum(sizes), h, D], this rank's heads of all tokens -> [B, T, H, D], all heads of this rank's tokens.

    The inverse of `start_seq_to_head`, and its transpose: a head that several ranks worked on is summed, in float32 at
    least and in rank order. Arguments as there.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all".
    """
    count = max(part.stop for part in heads)
    parts = list(x.split(list(sizes), dim=1))
    shapes = [(x.shape[0], sizes[axis.rank], len(part), x.shape[3]) for part in heads]
    return _start(axis, parts, shapes, lambda received: _sum_heads(received, heads, count))


def _start(
    axis: Axis,
    parts: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    assemble: Callable[[Sequence[Tensor]], Tensor],
) -> Collective[Tensor]:
    sent, received, works = start_parts(axis, parts, shapes, "all_to_all")
    return Collective(axis, (sent,), works, lambda: assemble(received) if works else received[0])


def _sum_heads(received: Sequence[Tensor], heads: Sequence[range], count: int) -> Tensor:
    """Puts each rank's heads in their places; where several hold one head, adds."""
    if sum(map(len, heads)) == count:
        return torch.cat(list(received), dim=2)
    first = received[0]
    whole = first.new_zeros((*first.shape[:2], count, first.shape[3]), dtype=wide(first.dtype))
    for part, place in zip(received, heads, strict=True):
        whole[:, :, place.start : place.stop] += part
    return whole.to(first.dtype)
