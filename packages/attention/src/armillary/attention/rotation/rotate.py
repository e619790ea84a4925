"""Tensors going round a circle of ranks: the walk that both engines share, and its exchanges.

While a rank computes with the traveller in hand, the next is already on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from armillary.attention.rotation.topology import Circle, Moving
from armillary.attention.spec import Call
from armillary.attention.tiling.block import Cell
from armillary.core import Axis, FlatBuffer, start_exchange


class Hand(NamedTuple):
    """What a rank has of the traveller at a step: these tokens of its shard, on dim 1 of the tensors."""

    tokens: range
    tensors: tuple[Tensor, ...]

    def tokens_of(self, tokens: range) -> tuple[Tensor, ...]:
        """Views of some of the tokens."""
        return tuple(tokens_of(x, self.tokens, tokens) for x in self.tensors)


@dataclass(frozen=True)
class Rotation:
    """A circle of R ranks, as one of them sees it.

    Args:
        axis: the mesh axis that it is on.
        back: the same axis with another communicator, for what goes back to its owner.
        circle: who passes what to whom.
    """

    axis: Axis
    back: Axis
    circle: Circle

    @classmethod
    def of_all(cls, axis: Axis, back: Axis, moving: Moving) -> Rotation:
        """All ranks of the axis in a circle, each with its own shard."""
        return cls(axis, back, Circle.of_all(axis.size, moving))

    @cached_property
    def place(self) -> int:
        """This rank's index in the circle."""
        return self.circle.ranks.index(self.axis.rank)

    def shorter_way(self, call: Call) -> Rotation:
        """This circle or the opposite one, whichever sends fewer tokens."""
        return replace(self, circle=self.circle.shorter_way(call.grid))

    def origin(self, step: int) -> int:
        """The place from which the traveller set out that is in hand at `step`."""
        return self.circle.origin(self.place, step)

    def ahead(self, steps: int) -> int:
        """The rank of the axis that is so many places further round the circle."""
        return self.circle.ahead(self.place, steps)

    def needed(self, call: Call) -> tuple[tuple[range, ...], ...]:
        """For the traveller from each place: its tokens that any rank so many steps on, or further, sees."""
        return self.circle.needed(call.grid)

    def seen(self, call: Call, place: int, origin: int) -> range:
        """Tokens of the traveller from `origin` that the rank at `place` sees."""
        return self.circle.seen(call.grid, place, origin)

    def cell(self, call: Call, step: int, first: int) -> Cell:
        """What this rank computes at `step` with the traveller in hand, from its token `first` on."""
        query, key = self.circle.cell(self.place, self.origin(step))
        if self.circle.moving == "keys":
            return Cell(call, query, key, first_key=first)
        return Cell(call, query, key, first_query=first)

    def walk(self, tensors: Sequence[Tensor], call: Call) -> Iterator[tuple[int, Hand]]:
        """(step, what is in hand of its traveller) for each step; what is needed next is under way meanwhile.

        Args:
            tensors: what sets out from here, tokens on dim 1.
        """
        needed, flat = self.needed(call), None
        hand = Hand(needed[self.place][0], tuple(tensors))
        for step in range(len(self.circle.ranks)):
            leaving, coming = needed[self.origin(step)][step + 1], needed[self.origin(step + 1)][step + 1]
            if flat is None or leaving != hand.tokens:  # at first, or where less goes on than came
                flat = FlatBuffer.of(hand.tokens_of(leaving)) if leaving else None
            buffers = FlatBuffer.like(tensors, len(coming)) if coming else None
            send = {self.ahead(1): flat} if flat else {}
            receive = {self.ahead(-1): buffers} if buffers else {}
            exchange = start_exchange(self.axis, send, receive)
            yield step, hand
            exchange.wait()
            flat, hand = buffers, Hand(coming, buffers.tensors if buffers else ())
            del exchange, send, receive  # two shards are alive at a time, not three


def tokens_of(x: Tensor, held: range, wanted: range) -> Tensor:
    """Some of the tokens that `x` holds on dim 1."""
    return x if wanted == held else x.narrow(1, wanted.start - held.start, len(wanted))
