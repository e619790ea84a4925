"""Turning sequence shards into head shards and back, along one axis (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Heads are given as one range per rank, so that nothing needs to divide anything: ranks may work on different numbers of
heads, and ranges may overlap, as those of key/value heads do when there are fewer of them than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core.exchange import finish
from armillary.core.ledger import record
from armillary.core.mesh import Axis


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all under way. Hold it until `wait` has returned: it keeps the buffers alive."""

    axis: Axis
    sent: Tensor
    received: tuple[Tensor, ...]
    work: dist.Work | None
    assemble: Callable[[Sequence[Tensor]], Tensor]

    def wait(self) -> Tensor:
        """The assembled tensor. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError: the axis' timeout passed, or a rank of the axis is gone.
        """
        if self.work is not None:
            finish([self.work], self.axis, f"for all of its ranks {self.axis.ranks()}")
        return self.assemble(self.received)


def start_seq_to_head(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> AllToAll:
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


def start_head_to_seq(x: Tensor, axis: Axis, sizes: Sequence[int], heads: Sequence[range]) -> AllToAll:
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
    shapes: Sequence[tuple[int, int, int, int]],
    assemble: Callable[[Sequence[Tensor]], Tensor],
) -> AllToAll:
    """Sends parts[w] to rank w of the axis, and receives a tensor of shapes[w] from it."""
    if axis.size == 1:
        return AllToAll(axis, parts[0], tuple(parts), None, itemgetter(0))
    send = [part.numel() for part in parts]
    receive = [torch.Size(shape).numel() for shape in shapes]
    packed, buffer = parts[0].new_empty(sum(send)), parts[0].new_empty(sum(receive))
    for into, part in zip(packed.split(send), parts, strict=True):
        into.view(part.shape).copy_(part)
    record(axis.name, "all_to_all", (sum(send) - send[axis.rank]) * packed.element_size())
    work = dist.all_to_all_single(buffer, packed, receive, send, group=axis.group, async_op=True)
    received = tuple(flat.view(shape) for flat, shape in zip(buffer.split(receive), shapes, strict=True))
    return AllToAll(axis, packed, received, work, assemble)


def _sum_heads(received: Sequence[Tensor], heads: Sequence[range], count: int) -> Tensor:
    """Puts each rank's heads in their places; where several hold one head, adds."""
    if sum(map(len, heads)) == count:
        return torch.cat(list(received), dim=2)
    first = received[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    whole = first.new_zeros((*first.shape[:2], count, first.shape[3]), dtype=wide)
    for part, place in zip(received, heads, strict=True):
        whole[:, :, place.start : place.stop] += part
    return whole.to(first.dtype)
