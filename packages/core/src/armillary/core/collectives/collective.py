"""What the collectives share: one that is under way, and the all-to-all of uneven parts that most of them are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core.collectives.exchange import finish
from armillary.core.mesh import Axis
from armillary.core.observe.trace import record, watched
from armillary.core.validation import check_tensor, integer

R = TypeVar("R")


@dataclass(frozen=True)
class Collective(Generic[R]):
    """A collective under way. Hold it until `wait` has returned: it keeps the buffers alive."""

    axis: Axis
    buffers: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]
    assemble: Callable[[], R]

    def wait(self) -> R:
        """What the collective gives. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError: the axis' timeout passed, or a rank of the axis is gone.
        """
        if self.works:
            finish(self.works, self.axis, lambda: f"for all of its ranks {self.axis.ranks()}")
        return self.assemble()


class PartsInFlight(NamedTuple):
    """An all-to-all of parts under way: what is sent, the flat buffer that fills in rank order, and the work."""

    sent: Tensor
    buffer: Tensor
    works: tuple[dist.Work, ...]


def start_parts(axis: Axis, packed: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> PartsInFlight:
    """Starts sending send[w] elements to rank w of the axis, and receiving receive[w] from it.

    Args:
        packed: contiguous; the parts one after another, as `pack` has them.
        kind: as which the bytes are counted: those of the parts for other ranks.
    """
    buffer, mine = packed.new_empty(sum(receive)), send[axis.rank]
    others = len(send) - send.count(0) - (mine > 0)
    under_way = record(axis.name, kind, packed.nbytes - mine * packed.itemsize, others)
    work = dist.all_to_all_single(buffer, packed.view(-1), list(receive), list(send), group=axis.group, async_op=True)
    works = (cast(dist.Work, work),)
    return PartsInFlight(packed, buffer, works if under_way is None else watched(works, under_way))


def pack(parts: Sequence[Tensor]) -> Tensor:
    """The parts, copied one after another: along a dim in front of theirs where all have one shape, else flat."""
    if all(part.shape == parts[0].shape for part in parts):
        flat = parts[0].new_empty((len(parts), *parts[0].shape))
        return torch.stack(list(parts), out=flat)  # left to itself, stack takes over strides that all parts have
    sizes = [part.numel() for part in parts]
    flat = parts[0].new_empty(sum(sizes))
    for into, part in zip(flat.split(sizes), parts, strict=True):
        into.view(part.shape).copy_(part)
    return flat


def tokens_on(x: Tensor, dim: int) -> int:
    check_tensor("x", x)
    if not 0 <= integer("dim", dim) < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    return x.shape[dim]


def check_tokens(name: str, x: Tensor, dim: int, tokens: int, sizes: Sequence[int]) -> None:
    if tokens_on(x, dim) != tokens:
        raise ValueError(f"{name} {tuple(x.shape)} must have {tokens} tokens on dim {dim}: sizes are {tuple(sizes)}")
