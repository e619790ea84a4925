"""All-to-all between sequence shards and head shards along one axis (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Each rank works on a range of heads. The ranks need not have equally many heads. Ranges may also overlap: if there are
fewer key/value heads than ranks, several ranks get the same head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.core.collectives.collective import Collective, accumulation_dtype, pack, start_parts
from armillary.core.mesh import Axis


class PackedHeads(NamedTuple):
    """Heads of this rank's tokens [B, T, H, D], copied in the order in which they are sent.

    The tensor from which they were copied may be freed.

    Args:
        flat: for rank 0, then rank 1, ..., the heads [B, T, h, D] that the rank works on. On an axis of one rank, the
            uncopied tensor [B, T, H, D].
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
        """Copies the heads of `x` [B, T, H, D] in the order of ranks; heads[w] is the range of rank w."""
        batch, tokens, count, dim = x.shape
        counts, per_rank = _head_counts(tuple(heads), count)
        if len(counts) == 1:
            flat = x
        elif per_rank:  # one strided copy takes a tenth of the host time of one copy for each rank
            flat = x.view(batch, tokens, len(counts), per_rank, dim).permute(2, 0, 1, 3, 4)
            flat = flat.clone(memory_format=torch.contiguous_format)
        else:
            flat = pack([x[:, :, head_range.start : head_range.stop] for head_range in heads])
        return cls(flat, batch, tokens, dim, counts)


@lru_cache(maxsize=256)
def _head_counts(heads: tuple[range, ...], count: int | None = None) -> tuple[tuple[int, ...], int]:
    """Returns (number of heads of each rank, number per rank if all have equally many).

    The second number is 0 if ranks have different numbers of heads, or if ranges overlap or do not end at `count`.

    Args:
        count: number of all heads; None if it is unknown.
    """
    counts, first = tuple(map(len, heads)), len(heads[0])
    even = all(head_range == range(rank * first, (rank + 1) * first) for rank, head_range in enumerate(heads))
    return counts, first if even and count in (None, first * len(heads)) else 0


def start_seq_to_head(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """Starts the exchange of tokens for heads: [B, T, H, D] -> [B, sum(sizes), h, D], this rank's heads of all tokens.

    Args:
        x: local tensor with all heads of this rank's tokens; T is `sizes[axis.rank]`.
        sizes: number of tokens on each rank of the axis. The result has the tokens of rank 0, then of rank 1, ...
        heads: for each rank the range of heads that it works on; h is `len(heads[axis.rank])`.

    Bytes sent: B T D e for every head of every other rank, kind "all_to_all".
    """
    return start_packed_to_head(PackedHeads.cut(x, heads), axis, sizes)


def start_packed_to_head(heads: PackedHeads, axis: Axis, sizes: Sequence[int]) -> Collective[Tensor]:
    """Starts `start_seq_to_head` from heads that are already packed."""
    flat, batch, tokens, dim, counts = heads
    if axis.size == 1:
        return Collective(axis, (flat,), (), lambda: flat)
    # Rank w gets its heads of our tokens, and we get our heads of its tokens. All counts are of elements.
    own_heads = counts[axis.rank]
    elements_per_head, elements_per_token = batch * tokens * dim, batch * own_heads * dim
    send, receive = [elements_per_head * count for count in counts], [elements_per_token * size for size in sizes]
    send_buffer, buffer, works = start_parts(axis, flat, send, receive, "all_to_all")

    def assemble() -> Tensor:
        if batch == 1:  # the tokens of all ranks already lie one after another, in the order of the result
            return buffer.view(1, sum(sizes), own_heads, dim)
        received = zip(buffer.split_with_sizes(receive), sizes, strict=True)
        return torch.cat([values.view(batch, size, own_heads, dim) for values, size in received], dim=1)

    return Collective(axis, (send_buffer,), works, assemble)


def start_head_to_seq(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> Collective[Tensor]:
    """Starts the exchange of heads for tokens: [B, sum(sizes), h, D] -> [B, T, H, D], all heads of this rank's tokens.

    The transpose of `start_seq_to_head`, with the same `axis`, `sizes` and `heads`. A head that several ranks worked on
    is summed over them in rank order, in float32 or wider.

    Bytes sent: B h D e for every token of every other rank, kind "all_to_all".
    """
    exchange = start_head_to_parts(x, axis, sizes, heads)
    return Collective(axis, exchange.buffers, exchange.works, lambda: _sum_heads(exchange.assemble(), heads))


def start_head_to_parts(
    x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]
) -> Collective[tuple[Tensor, ...]]:
    """Starts `start_head_to_seq` without joining the heads: the result is [B, T, h, D] of each rank, in rank order.

    If every rank has one head, the result is instead a single view with all heads, [B, T, H, D].
    """
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: (x,))
    batch, _, own_heads, dim = x.shape
    counts, per_rank = _head_counts(tuple(heads))
    # With one batch row, the tokens for rank 0, 1, ... lie one after another in x already.
    send_values = x.contiguous() if batch == 1 else pack(x.split_with_sizes(list(sizes), 1))
    shape = batch, sizes[axis.rank]
    send = [batch * own_heads * dim * size for size in sizes]
    receive = [batch * sizes[axis.rank] * dim * count for count in counts]
    send_buffer, buffer, works = start_parts(axis, send_values, send, receive, "all_to_all")

    def assemble() -> tuple[Tensor, ...]:
        if per_rank == 1:  # the dim of ranks is the dim of heads: a permuted view has all heads, without a copy
            return (buffer.view(len(counts), *shape, dim).permute(1, 2, 0, 3),)
        if per_rank:
            return buffer.view(len(counts), *shape, per_rank, dim).unbind(0)
        received = zip(buffer.split_with_sizes(receive), counts, strict=True)
        return tuple(values.view(*shape, count, dim) for values, count in received)

    return Collective(axis, (send_buffer,), works, assemble)


def _sum_heads(head_parts: Sequence[Tensor], heads: Sequence[range]) -> Tensor:
    """Joins the heads of all ranks in head order, and sums a head that several ranks have."""
    if len(head_parts) == 1:
        return head_parts[0]
    count = max(head_range.stop for head_range in heads)
    if sum(map(len, heads)) == count:  # no head is on two ranks
        return torch.cat(list(head_parts), dim=2)
    # Key/value heads on several ranks: their gradients are sums over the ranks that used them.
    first = head_parts[0]
    total = first.new_zeros((*first.shape[:2], count, first.shape[3]), dtype=accumulation_dtype(first.dtype))
    for part, rank_heads in zip(head_parts, heads, strict=True):
        total[:, :, rank_heads.start : rank_heads.stop] += part
    return total.to(first.dtype)
