"""The engine that rotates keys and values past queries that stay (Ring Attention, arXiv 2310.01889).

While a rank computes with the shard in hand, the next one is already on its way: the engine owns the double buffers,
their overlap with computation, and the merge. A method gives it data only: a `Rotation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from armillary.attention.call import Call, Saved
from armillary.attention.cell import Cell
from armillary.attention.merge import Merge, Sum
from armillary.core import Axis, Exchange, start_exchange


@dataclass(frozen=True)
class Rotation:
    """A walk, as one rank sees it.

    Args:
        axis: the mesh axis that it happens on.
        home: the shard whose queries, keys and values this rank has.
        in_hand: the shard whose keys this rank holds at each step; the first is `home`.
        to, source: ranks on the axis that it sends to and receives from at every step.
    """

    axis: Axis
    home: int
    in_hand: tuple[int, ...]
    to: int
    source: int

    def send(self, tensors: Sequence[Tensor], tokens: int) -> Exchange:
        """Starts sending `tensors` on; what comes in is alike, but for `tokens` instead of dim 1."""
        shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        return start_exchange(self.axis, tensors, shapes, to=self.to, source=self.source)


def forward(q: Tensor, k: Tensor, v: Tensor, walk: Rotation, call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]) of this rank's queries over the keys of all shards in the walk.

    Bytes sent: 2 B T K D e a step, for all steps but the last.
    """
    merged = Merge((*q.shape[:3], v.shape[3]), q.dtype, q.device)
    following = walk.in_hand[1:]
    for step, shard in enumerate(walk.in_hand):
        coming = walk.send((k, v), call.layout.sizes[following[step]]) if step < len(following) else None
        Cell(call, walk.home, shard).forward(q, k, v, merged)
        if coming:
            k, v = coming.wait()
    return merged.result()


def backward(dout: Tensor, saved: Saved, walk: Rotation, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's shard, in the accumulation dtype.

    The gradients of a shard's keys travel one step behind the keys and gather each rank's share on the way. What the
    shard's own rank adds stays at home until they come back, so they make one hop less than there are ranks.

    Bytes sent: 2 B T K D (e + a) a step, for all steps but the last.
    """
    k, v, dq = saved.k, saved.v, Sum.like(saved.q)
    sizes, following = call.layout.sizes, walk.in_hand[1:]
    at_home: tuple[Tensor, Tensor] | None = None
    gathering: Exchange | None = None
    for step, shard in enumerate(walk.in_hand):
        coming = walk.send((k, v), sizes[following[step]]) if step < len(following) else None
        shares = Cell(call, walk.home, shard).backward(dout, saved, k, v, dq)
        if at_home is None:
            at_home = shares
        else:
            if gathering:
                _add(shares, gathering.wait())
            tokens = sizes[following[step]] if step < len(following) else sizes[walk.home]
            gathering = walk.send(shares, tokens)
        if coming:
            k, v = coming.wait()
    assert at_home is not None
    if gathering:
        _add(at_home, gathering.wait())
    return dq.value(), *at_home


def _add(into: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    for total, share in zip(into, shares, strict=True):
        total += share
