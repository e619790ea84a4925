"""How what ranks compute for a traveller gets back to the rank that it set out from.

Both ways overlap with the computation of the next step, on a communicator of their own, and add up in the same order on
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from armillary.attention.call import Call
from armillary.attention.rotation import Rotation, empty, packed
from armillary.core import Exchange, start_exchange

Shares = Sequence[Tensor]
"""What one rank has computed for one traveller; empty where it has not met it."""


class Returns(Protocol):
    def give(self, step: int, shares: Shares) -> None:
        """Hands over this rank's shares for the traveller that was in hand at `step`. To be called at every step."""
        ...

    def home(self) -> Shares:
        """The sums over all ranks for the traveller that set out from here."""
        ...


class Along:
    """Sums follow their traveller one step behind, gathering each rank's share; the last rank sends them home.

    The share of the rank that the traveller set out from waits there. So sums make as many hops as their traveller.
    """

    def __init__(self, walk: Rotation, call: Call) -> None:
        self.walk, self.hops, self.sizes = walk, walk.reach(call), walk.sizes(call)
        self.own: Shares = ()
        self.passing: Shares = ()
        self.returned: Shares = ()
        self.exchange: Exchange | None = None

    def give(self, step: int, shares: Shares) -> None:
        if step == 0:
            self.own = shares
            return
        self._wait()
        _add(shares, self.passing)
        walk, leaving, coming = self.walk, self.walk.origin(step), self.walk.origin(step + 1)
        target = walk.ahead(1) if step < self.hops[leaving] else walk.circle[leaving]
        self.passing = empty(self.own, self.sizes[coming]) if step < self.hops[coming] else ()
        receive = {walk.ahead(-1): self.passing} if self.passing else {}
        if step == self.hops[walk.place]:
            self.returned = empty(self.own, self.sizes[walk.place])
            receive[walk.ahead(step)] = self.returned
        self.exchange = start_exchange(walk.back, {target: packed(shares)} if shares else {}, receive)

    def home(self) -> Shares:
        self._wait()
        _add(self.own, self.returned)
        return self.own

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()


class Direct:
    """Each rank sends its share straight to the owner, against the direction of the travellers (TokenRing).

    Args:
        combine: takes the shares of another rank into those of this one; called in the order of steps. Adds, unless
            given.
    """

    def __init__(self, walk: Rotation, call: Call, combine: Callable[[Shares, Shares], None] | None = None) -> None:
        self.walk, self.call, self.combine = walk, call, combine or _add
        self.own: Shares = ()
        self.arriving: Shares = ()
        self.exchange: Exchange | None = None

    def give(self, step: int, shares: Shares) -> None:
        if step == 0:
            self.own = shares
            return
        self._wait()
        walk, owner, size = self.walk, self.walk.origin(step), len(self.walk.circle)
        met = walk.cell(self.call, (walk.place + step) % size, walk.place).visible
        self.arriving = empty(self.own, self.own[0].shape[1]) if met else ()
        send = {walk.circle[owner]: packed(shares)} if walk.cell(self.call, walk.place, owner).visible else {}
        self.exchange = start_exchange(walk.back, send, {walk.ahead(step): self.arriving} if met else {})

    def home(self) -> Shares:
        self._wait()
        return self.own

    def _wait(self) -> None:
        if self.exchange:
            self.exchange.wait()
            self.exchange = None
            if self.arriving:
                self.combine(self.own, self.arriving)


def _add(into: Shares, shares: Shares) -> None:
    for total, share in zip(into, shares, strict=bool(shares)):
        total += share
