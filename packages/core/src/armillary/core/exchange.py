"""Sending tensors from rank to rank along one axis, while something else is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from armillary.core.ledger import record
from armillary.core.mesh import Axis

Parcels = Mapping[int, Sequence[Tensor]]
"""Tensors by the rank of the axis that they go to, or come from."""


@dataclass(frozen=True)
class Exchange:
    """Tensors under way. Hold it until `wait` has returned: it keeps the buffers alive."""

    axis: Axis
    sent: Parcels
    received: Parcels
    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        """Returns when all has arrived and left. On CUDA the current stream waits, not the host.

        Raises:
            TimeoutError: the axis' timeout passed, or a neighbour is gone; names the ranks that were waited for.
        """
        ranks = self.axis.ranks()
        sources, targets = ([ranks[peer] for peer in peers] for peers in (self.received, self.sent))
        finish(self.works, self.axis, f"to receive from {sources} and send to {targets}")


def start_exchange(axis: Axis, send: Parcels, receive: Parcels) -> Exchange:
    """Starts sending and receiving along an axis; returns at once.

    What arrives goes to buffers of its own, so that computation may go on reading what is sent: double buffering. All
    ranks must start their exchanges on an axis in the same order.

    Args:
        send: contiguous tensors by receiving rank. Kept alive until `wait`; must not be written to before.
        receive: contiguous empty tensors by sending rank, to be filled. Must not be touched before `wait`.

    Bytes sent: those of `send`, kind "p2p".

    Raises:
        ValueError: a rank that would send to or receive from itself, or a peer that is not on the axis.
    """
    for peer in (*send, *receive):
        if peer == axis.rank or not 0 <= peer < axis.size:
            raise ValueError(f"rank {axis.rank} of axis {axis.name!r} cannot exchange with {peer} of {axis.size} ranks")
    record(axis.name, "p2p", sum(x.nbytes for tensors in send.values() for x in tensors))
    operations = [
        dist.P2POp(operation, x, group=axis.group, group_peer=peer)
        for operation, parcels in ((dist.isend, send), (dist.irecv, receive))
        for peer, tensors in parcels.items()
        for x in tensors
    ]
    return Exchange(axis, send, receive, tuple(dist.batch_isend_irecv(operations)) if operations else ())


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
