"""How what ranks compute for a shard that goes round gets back to the rank that it belongs to.

Both ways overlap with the computation of the next step, on a communicator of their own, and add up in the same order on
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from armillary.attention.rotation.rotate import Rotation, tokens_of
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import FlatBuffer, start_exchange
from armillary.core.collectives.exchange import Exchange
from armillary.core.network import Send

Shares = Sequence[Tensor]
"""What one rank has computed for some tokens of one shard; empty where it has nothing to do with them."""


class Returns(Protocol):
    def tokens(self, step: int) -> range:
        """The tokens that shares are to be about, of the shard in hand at `step`."""
        ...

    def push(self, step: int, shares: Shares) -> None:
        """Hands over this rank's shares for the shard that was in hand at `step`. To be called at every step."""
        ...

    def finish(self) -> Shares:
        """The sums over all ranks for this rank's own shard."""
        ...


class RingReduce:
    """Sums follow their shard one step behind, gathering each rank's share.

    The share of the rank that the shard belongs to waits there. Tokens that no rank further on sees are sent back by
    the last that does. So sums make as many hops as their shard, token by token.
    """

    def __init__(self, ring: Rotation) -> None:
        self.ring, self.needed = ring, ring.needed
        self.own: Shares = ()
        self.passing: FlatBuffer | None = None
        self.targets: Shares = ()  # where in `own` to add what is being returned
        self.returned: FlatBuffer | None = None
        self.exchange: Exchange | None = None

    @staticmethod
    def sends(topology: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
        """What all ranks of a ring send for the shards that were in hand at `step`, in tokens."""
        if step == 0:
            return
        needed = topology.needed(grid)
        for place, rank in enumerate(topology.ranks):
            origin = topology.origin(place, step)
            held, onward = map(len, needed[origin][step : step + 2])
            yield Send(rank, topology.ahead(place, 1), onward)
            yield Send(rank, topology.ranks[origin], held - onward)

    def tokens(self, step: int) -> range:
        return self.needed[self.ring.origin(step)][step]

    def push(self, step: int, shares: Shares) -> None:
        if step == 0:
            self.own = shares
            return
        self._wait()
        # At the last step both neighbours and the owner may be one rank, but then nothing is passed on.
        send = self._outgoing(step, shares)
        ring, coming = self.ring, self.needed[self.ring.origin(step + 1)][step + 1]
        self.passing = FlatBuffer.like(self.own, len(coming)) if coming else None
        receive = {ring.ahead(-1): self.passing} if self.passing else {}
        mine = self.needed[ring.place]
        complete = _left_out(mine[step], mine[step + 1])
        self.targets = [tokens_of(x, mine[0], piece) for piece in complete for x in self.own]
        if self.targets:
            self.returned = receive[ring.ahead(step)] = FlatBuffer.like(self.targets)
        self.exchange = start_exchange(ring.return_axis, send, receive)

    def finish(self) -> Shares:
        self._wait()
        return self.own

    def _outgoing(self, step: int, shares: Shares) -> dict[int, FlatBuffer]:
        """The sums for the shard that was in hand: those that go on after it, and those that are complete."""
        origin, passing, send = self.ring.origin(step), self.passing, dict[int, FlatBuffer]()
        held, onward = self.needed[origin][step : step + 2]
        if passing:
            _add(passing.tensors, shares)

        def of(pieces: list[range]) -> FlatBuffer:
            if passing and len(pieces) == 1:
                return passing.part(pieces[0].start - held.start, len(pieces[0]))
            sums = passing.tensors if passing else shares
            return FlatBuffer.of([tokens_of(x, held, piece) for piece in pieces for x in sums])

        if onward:
            send[self.ring.ahead(1)] = passing if passing and onward == held else of([onward])
        if complete := _left_out(held, onward):
            send[self.ring.topology.ranks[origin]] = of(complete)
        return send

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
        if self.returned:
            _add(self.targets, self.returned.tensors)
            self.returned = None


class DirectReduce:
    """Each rank sends its share straight to the owner, against the direction of the ring (TokenRing).

    Args:
        combine: takes the shares of another rank, for some tokens, into those of this one; called in the order of
            steps. Adds, unless given.
    """

    def __init__(self, ring: Rotation, combine: Callable[[range, Shares], None] | None = None) -> None:
        self.ring, self.combine = ring, combine
        self.all = ring.needed[ring.place][0]
        self.own: Shares = ()
        self.arriving: tuple[range, FlatBuffer] | None = None
        self.exchange: Exchange | None = None

    @staticmethod
    def sends(topology: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
        """What all ranks of a ring send for the shards that were in hand at `step`, in tokens."""
        if step == 0:
            return
        for place, rank in enumerate(topology.ranks):
            origin = topology.origin(place, step)
            yield Send(rank, topology.ranks[origin], len(topology.seen(grid, place, origin)))

    def tokens(self, step: int) -> range:
        return self.ring.seen(self.ring.place, self.ring.origin(step)) if step else self.all

    def push(self, step: int, shares: Shares) -> None:
        if step == 0:
            self.own = shares
            return
        self._wait()
        ring, other = self.ring, (self.ring.place + step) % len(self.ring.topology.ranks)
        theirs = ring.seen(other, ring.place)
        self.arriving = (theirs, FlatBuffer.like(self.own, len(theirs))) if theirs else None
        send = {ring.topology.ranks[ring.origin(step)]: FlatBuffer.of(shares)} if shares else {}
        receive = {ring.ahead(step): self.arriving[1]} if self.arriving else {}
        self.exchange = start_exchange(ring.return_axis, send, receive)

    def finish(self) -> Shares:
        self._wait()
        return self.own

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
        if self.arriving:
            tokens, parcel = self.arriving
            (self.combine or self._add)(tokens, parcel.tensors)
            self.arriving = None

    def _add(self, tokens: range, shares: Shares) -> None:
        _add([tokens_of(x, self.all, tokens) for x in self.own], shares)


def _left_out(whole: range, kept: range) -> list[range]:
    """What of `whole` is not in `kept`, which is inside it: at most one range on either side."""
    pieces = (range(whole.start, kept.start), range(kept.stop, whole.stop)) if kept else (whole,)
    return [piece for piece in pieces if piece]


def _add(into: Shares, shares: Shares) -> None:
    for total, share in zip(into, shares, strict=True):
        total += share
