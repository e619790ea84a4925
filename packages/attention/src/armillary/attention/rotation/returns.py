"""How what ranks compute for a shard that goes round gets back to the rank that it belongs to.

Both ways overlap with the computation of the next step, on a communicator of their own, and add up in the same order on
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from armillary.attention.rotation.rotate import RingStep, Rotation
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core import FlatBuffer, compat, start_exchange
from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.exchange import Exchange, ReceiveBuffers
from armillary.core.network import Send
from armillary.core.token_ranges import TokenRanges

Shares = Sequence[Tensor]
"""What one rank has computed for some tokens of one shard; empty where it has nothing to do with them."""


class Wanted(NamedTuple):
    """What shares are to be about, of the shard in hand.

    Args:
        tokens: of the shard.
        packed: those, as they lie among the tokens in hand; None: they are all of these.
    """

    tokens: TokenRanges
    packed: TokenRanges | None


class Returns(Protocol):
    def wanted(self, step: int) -> Wanted:
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
        self.ring = ring
        self.own: Shares = ()
        self.passing: FlatBuffer | None = None
        self.returned: tuple[TokenRanges, FlatBuffer] | None = None  # and where in `own` to add it
        self.exchange: Exchange | None = None

    @staticmethod
    def sends(topology: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
        """What all ranks of a ring send for the shards that were in hand at `step`, in tokens."""
        if step == 0:
            return
        reach = topology.reach(grid)
        for place, rank in enumerate(topology.ranks):
            origin = topology.origin(place, step)
            held, onward = reach[origin].counts[step : step + 2]
            yield Send(rank, topology.ahead(place, 1), onward)
            yield Send(rank, topology.ranks[origin], held - onward)

    def wanted(self, step: int) -> Wanted:
        return Wanted(self.ring.steps[step].held, None)

    def push(self, step: int, shares: Shares) -> None:
        if step == 0:
            self.own = _wide(shares)
            self.buffers = ReceiveBuffers(self.own, [following.coming for following in self.ring.steps[1:]])
            return
        self._wait()
        # At the last step both neighbours and the owner may be one rank, but then nothing is passed on.
        ring, here = self.ring, self.ring.steps[step]
        send = self._outgoing(here, shares)
        # Of sums for some tokens alone, it is mostly copies that are sent.
        passing = self.passing
        sending = passing is not None and any(
            compat.share_memory(flat.buffer, passing.buffer) for flat in send.values()
        )
        self.passing = self.buffers.take(last_in_use=sending)
        receive = {ring.ahead(-1): self.passing} if self.passing else {}
        if here.returning.runs:
            self.returned = here.returning, FlatBuffer.like(self.own, here.returning.count)
            receive[ring.ahead(step)] = self.returned[1]
        self.exchange = start_exchange(ring.return_axis, send, receive)

    def finish(self) -> Shares:
        self._wait()
        return self.own

    def _outgoing(self, here: RingStep, shares: Shares) -> dict[int, FlatBuffer]:
        """The sums for the shard that was in hand: those that go on after it, and those that are complete."""
        passing, send = self.passing, dict[int, FlatBuffer]()
        if passing:
            _add(passing.tensors, shares)

        def sums(tokens: TokenRanges) -> FlatBuffer:
            return passing.part(tokens) if passing else FlatBuffer.of(_wide(shares), tokens)

        if here.leaving.runs:
            send[self.ring.ahead(1)] = sums(here.leaving)
        if here.ending.runs:
            send[self.ring.ahead(-here.step)] = sums(here.ending)
        return send

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
        if self.returned:
            tokens, parcel = self.returned
            _add_to(self.own, tokens, parcel.tensors)
            self.returned = None


class DirectReduce:
    """Each rank sends its share straight to the owner, against the direction of the ring (TokenRing).

    Args:
        combine: takes the shares of another rank, for some tokens, into those of this one; called in the order of
            steps. Adds, unless given.
    """

    def __init__(self, ring: Rotation, combine: Callable[[TokenRanges, Shares], None] | None = None) -> None:
        self.ring, self.combine = ring, combine
        self.own: Shares = ()
        self.arriving: tuple[TokenRanges, FlatBuffer] | None = None
        self.exchange: Exchange | None = None

    @staticmethod
    def sends(topology: RingTopology, grid: Grid, step: int) -> Iterator[Send]:
        """What all ranks of a ring send for the shards that were in hand at `step`, in tokens."""
        if step == 0:
            return
        for place, rank in enumerate(topology.ranks):
            origin = topology.origin(place, step)
            yield Send(rank, topology.ranks[origin], topology.seen(grid, place, origin).count)

    def wanted(self, step: int) -> Wanted:
        here = self.ring.direct[step]
        return Wanted(here.seen, here.packed)

    def push(self, step: int, shares: Shares) -> None:
        if step == 0:
            self.own = shares
            counts = [following.theirs.count for following in self.ring.direct[1:]]
            self.buffers = ReceiveBuffers(shares, counts)
            return
        self._wait()
        ring, theirs = self.ring, self.ring.direct[step].theirs
        buffer = self.buffers.take(last_in_use=False)  # it has been added
        self.arriving = None if buffer is None else (theirs, buffer)
        send = {ring.ahead(-step): FlatBuffer.of(shares)} if shares else {}
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
            if self.combine:
                self.combine(tokens, parcel.tensors)
            else:
                _add_to(self.own, tokens, parcel.tensors)
            self.arriving = None


def _wide(shares: Shares) -> Shares:
    """In the accumulation dtype."""
    return [share.to(accumulation_dtype(share.dtype)) for share in shares]


def _add(into: Shares, shares: Shares) -> None:
    for total, share in zip(into, shares, strict=True):
        total += share


def _add_to(own: Shares, tokens: TokenRanges, shares: Shares) -> None:
    for total, share in zip(own, shares, strict=True):
        tokens.add(total, share)
