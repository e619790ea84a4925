"""Tensors going round a circle of ranks: the walk that both engines share, as data, and its exchanges.

On every rank of a circle something stays (its residents) and something passes by (the travellers): keys go past
queries, or queries past keys. While a rank computes with the traveller in hand, the next is already on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch import Tensor

from armillary.attention.call import Call
from armillary.attention.cell import Cell
from armillary.core import Axis, start_exchange

Moving = Literal["keys", "queries"]


@dataclass(frozen=True)
class Rotation:
    """A circle of R ranks, as one of them sees it.

    Args:
        axis: the mesh axis that it is on.
        back: the same axis with another communicator, for what goes back to its owner.
        circle: ranks of the axis, in the order in which travellers visit them.
        place: this rank's index in `circle`.
        residents: the shard that stays on each rank of the circle.
        travellers: the shard that sets out from each rank of the circle.
        moving: what travels; the other stays.
    """

    axis: Axis
    back: Axis
    circle: tuple[int, ...]
    place: int
    residents: tuple[int, ...]
    travellers: tuple[int, ...]
    moving: Moving

    def origin(self, step: int) -> int:
        """The place from which the traveller set out that is in hand at `step`."""
        return (self.place - step) % len(self.circle)

    def ahead(self, steps: int) -> int:
        """The rank of the axis that is so many places further round the circle."""
        return self.circle[(self.place + steps) % len(self.circle)]

    def cell(self, call: Call, place: int, origin: int) -> Cell:
        """What the rank at one place computes with the traveller from another."""
        return _cell(self.residents[place], self.travellers[origin], self.moving, call)

    def reach(self, call: Call) -> tuple[int, ...]:
        """How many steps the traveller from each place goes: to the last rank that sees anything of it."""
        return _reach(self.residents, self.travellers, self.moving, call)

    def sizes(self, call: Call) -> tuple[int, ...]:
        """Tokens of the traveller from each place."""
        layout = call.key_layout if self.moving == "keys" else call.layout
        return tuple(layout.sizes[shard] for shard in self.travellers)

    def walk(self, tensors: Sequence[Tensor], call: Call) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """(step, the traveller in hand, or nothing) for each step; the next traveller is under way meanwhile.

        Args:
            tensors: what sets out from here, tokens on dim 1.
        """
        hops, sizes = self.reach(call), self.sizes(call)
        hand: Sequence[Tensor] = packed(tensors)
        for step in range(len(self.circle)):
            coming = self.origin(step + 1)
            buffers = empty(tensors, sizes[coming]) if step < hops[coming] else ()
            send = {self.ahead(1): hand} if step < hops[self.origin(step)] else {}
            exchange = start_exchange(self.axis, send, {self.ahead(-1): buffers} if buffers else {})
            yield step, hand
            exchange.wait()
            hand = buffers


def _cell(resident: int, traveller: int, moving: Moving, call: Call) -> Cell:
    return Cell(call, resident, traveller) if moving == "keys" else Cell(call, traveller, resident)


@lru_cache(maxsize=1024)
def _reach(residents: tuple[int, ...], travellers: tuple[int, ...], moving: Moving, call: Call) -> tuple[int, ...]:
    size = len(residents)

    def last(origin: int) -> int:
        traveller = travellers[origin]
        steps = (
            s for s in range(size - 1, 0, -1) if _cell(residents[(origin + s) % size], traveller, moving, call).visible
        )
        return next(steps, 0)

    return tuple(last(origin) for origin in range(size))


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, contiguous: what is sent must lie in one piece."""
    return tuple(x.contiguous() for x in tensors)


def empty(like: Sequence[Tensor], tokens: int) -> tuple[Tensor, ...]:
    """Contiguous buffers as `like`, but for their tokens on dim 1."""
    return tuple(x.new_empty((x.shape[0], tokens, *x.shape[2:])) for x in like)
