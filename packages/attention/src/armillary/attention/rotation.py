"""Tensors going round a circle of ranks: the walk that both engines share, as data, and its exchanges.

On every rank of a circle something stays (its residents) and something passes by (the travellers): keys go past
queries, or queries past keys. While a rank computes with the traveller in hand, the next is already on its way. Of a
traveller, no more goes on than what some rank further on sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor

from armillary.attention.call import Call
from armillary.attention.cell import Cell
from armillary.attention.mask import AttentionMask
from armillary.attention.tiles import hull
from armillary.core import Axis, Parcel, SequenceLayout, start_exchange

Moving = Literal["keys", "queries"]


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

    @classmethod
    def of_all(cls, axis: Axis, back: Axis, moving: Moving) -> Rotation:
        """All ranks of the axis in a circle, each with its own shard."""
        ranks = tuple(range(axis.size))
        return cls(axis, back, ranks, axis.rank, residents=ranks, travellers=ranks, moving=moving)

    def shorter_way(self, call: Call) -> Rotation:
        """This circle or the opposite one, whichever sends fewer tokens; the same choice on every rank of it.

        With causal masks and zigzag shards, keys that go down visit those who see all of them first, then those who see
        half: three quarters of what goes up. Where all see all, both ways are equal, and it is this one.
        """
        opposite = replace(
            self,
            circle=self.circle[::-1],
            place=len(self.circle) - 1 - self.place,
            residents=self.residents[::-1],
            travellers=self.travellers[::-1],
        )
        return min((self, opposite), key=lambda way: way.tokens_sent(call))

    def tokens_sent(self, call: Call) -> int:
        """By all ranks of the circle together, as many times as they make a hop."""
        return _tokens_sent(self.residents, self.travellers, self.moving, _seen_by(call))

    def origin(self, step: int) -> int:
        """The place from which the traveller set out that is in hand at `step`."""
        return (self.place - step) % len(self.circle)

    def ahead(self, steps: int) -> int:
        """The rank of the axis that is so many places further round the circle."""
        return self.circle[(self.place + steps) % len(self.circle)]

    def needed(self, call: Call) -> tuple[tuple[range, ...], ...]:
        """For the traveller from each place: its tokens that any rank so many steps on, or further, sees.

        All of them at step 0, none at step R, and never more than the step before.
        """
        return _needed(self.residents, self.travellers, self.moving, _seen_by(call))

    def seen(self, call: Call, place: int, origin: int) -> range:
        """Tokens of the traveller from `origin` that the rank at `place` sees."""
        return _seen(self.residents[place], self.travellers[origin], self.moving, _seen_by(call))

    def cell(self, call: Call, step: int, first: int) -> Cell:
        """What this rank computes at `step` with the traveller in hand, from its token `first` on."""
        resident, traveller = self.residents[self.place], self.travellers[self.origin(step)]
        if self.moving == "keys":
            return Cell(call, resident, traveller, first_key=first)
        return Cell(call, traveller, resident, first_query=first)

    def walk(self, tensors: Sequence[Tensor], call: Call) -> Iterator[tuple[int, Hand]]:
        """(step, what is in hand of its traveller) for each step; what is needed next is under way meanwhile.

        Args:
            tensors: what sets out from here, tokens on dim 1.
        """
        needed, parcel = self.needed(call), None
        hand = Hand(needed[self.place][0], tuple(tensors))
        for step in range(len(self.circle)):
            leaving, coming = needed[self.origin(step)][step + 1], needed[self.origin(step + 1)][step + 1]
            if parcel is None or leaving != hand.tokens:  # at first, or where less goes on than came
                parcel = Parcel.of(hand.tokens_of(leaving)) if leaving else None
            buffers = Parcel.like(tensors, len(coming)) if coming else None
            send = {self.ahead(1): parcel} if parcel else {}
            receive = {self.ahead(-1): buffers} if buffers else {}
            exchange = start_exchange(self.axis, send, receive)
            yield step, hand
            exchange.wait()
            parcel, hand = buffers, Hand(coming, buffers.tensors if buffers else ())
            del exchange, send, receive  # two shards are alive at a time, not three


SeenBy = tuple[SequenceLayout, SequenceLayout, AttentionMask]
"""All that matters here of a call: the layouts of queries and keys, and the mask."""


def _seen_by(call: Call) -> SeenBy:
    return call.layout, call.key_layout, call.mask


@lru_cache(maxsize=1024)
def _needed(
    residents: tuple[int, ...], travellers: tuple[int, ...], moving: Moving, seen_by: SeenBy
) -> tuple[tuple[range, ...], ...]:
    layout, key_layout, _ = seen_by
    size, sizes = len(residents), (key_layout if moving == "keys" else layout).sizes

    def of(origin: int) -> tuple[range, ...]:
        ranges = [range(0)]
        for step in range(size - 1, 0, -1):
            seen = _seen(residents[(origin + step) % size], travellers[origin], moving, seen_by)
            ranges.append(_around(ranges[-1], seen))
        return (range(sizes[travellers[origin]]), *reversed(ranges))

    return tuple(of(origin) for origin in range(size))


@lru_cache(maxsize=1024)
def _tokens_sent(residents: tuple[int, ...], travellers: tuple[int, ...], moving: Moving, seen_by: SeenBy) -> int:
    return sum(len(tokens) for steps in _needed(residents, travellers, moving, seen_by) for tokens in steps[1:])


def _seen(resident: int, traveller: int, moving: Moving, seen_by: SeenBy) -> range:
    layout, key_layout, mask = seen_by
    queries, keys = (resident, traveller) if moving == "keys" else (traveller, resident)
    both = hull(layout.spans(queries), key_layout.spans(keys), mask)
    return both.keys if moving == "keys" else both.queries


def _around(a: range, b: range) -> range:
    """The smallest range with all of both."""
    return range(min(a.start, b.start), max(a.stop, b.stop)) if a and b else a or b


def tokens_of(x: Tensor, held: range, wanted: range) -> Tensor:
    """Some of the tokens that `x` holds on dim 1."""
    return x if wanted == held else x.narrow(1, wanted.start - held.start, len(wanted))
