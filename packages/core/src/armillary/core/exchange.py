"""Sending tensors from rank to rank along one axis, while something else is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core.ledger import record
from armillary.core.mesh import Axis


@dataclass(frozen=True)
class Exchange:
    """Tensors under way. Hold it until `wait` has returned: it keeps the buffers alive."""

    axis: Axis
    to: int
    source: int
    sent: tuple[Tensor, ...]
    received: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError: the axis' timeout passed, or a neighbour is gone; names the ranks that were waited for.
        """
        ranks = self.axis.ranks()
        finish(self.works, self.axis, f"to receive from rank {ranks[self.source]} and send to rank {ranks[self.to]}")
        return self.received


def start_exchange(
    axis: Axis, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], *, to: int, source: int
) -> Exchange:
    """Starts sending `tensors` to one rank of the axis and receiving as many from another; returns at once.

    The received tensors are fresh buffers, so that computation may go on reading `tensors` meanwhile: double buffering.
    Every rank of the axis must take part, in the same order of calls.

    Args:
        tensors: what this rank sends. Kept alive until `wait`; must not be written to before.
        shapes: the shapes of what arrives, dtype and device being those of `tensors`. Shards may differ in size.
        to, source: ranks on the axis; neither is this rank itself.

    Bytes sent: those of `tensors`, kind "p2p".
    """
    sent = tuple(tensor.contiguous() for tensor in tensors)
    received = tuple(torch.empty(tuple(s), dtype=t.dtype, device=t.device) for t, s in zip(sent, shapes, strict=True))
    record(axis.name, "p2p", sum(t.nbytes for t in sent))
    sends = [dist.P2POp(dist.isend, t, group=axis.group, group_peer=to) for t in sent]
    receives = [dist.P2POp(dist.irecv, t, group=axis.group, group_peer=source) for t in received]
    return Exchange(axis, to, source, sent, received, tuple(dist.batch_isend_irecv(sends + receives)))


def finish(works: Iterable[dist.Work], axis: Axis, waiting: str) -> None:
    """Waits for all of `works`; a timeout or a lost peer becomes a `TimeoutError` that says who was waited for."""
    try:
        for work in works:
            work.wait() if axis.timeout is None else work.wait(axis.timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TimeoutError(
            f"rank {axis.ranks()[axis.rank]} waited in vain on axis {axis.name!r} {waiting}: {reason}"
        ) from error
