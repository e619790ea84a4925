"""Who passes what to whom round a ring of ranks, and how much of it: pure, for the loop and for its plan.

On every rank of a ring one shard is stationary and the others rotate past it: keys past queries, or queries past keys.
Of a rotating shard, no more is sent on than what some rank further on sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from armillary.attention.tiling.grid import Grid
from armillary.core.network import Send

Moving = Literal["keys", "queries"]


@dataclass(frozen=True)
class RingTopology:
    """R ranks in a ring. A place is an index in it.

    Args:
        ranks: in the order in which rotating shards visit them, numbered as on their axis.
        stationary: the shard that stays on each rank of the ring.
        rotating: the shard that each rank of the ring has at step 0, and sends on.
        moving: what rotates; the other stays.
    """

    ranks: tuple[int, ...]
    stationary: tuple[int, ...]
    rotating: tuple[int, ...]
    moving: Moving

    @classmethod
    def of_all(cls, ranks: int, moving: Moving) -> RingTopology:
        """All ranks of an axis, each with its own shard."""
        every = tuple(range(ranks))
        return cls(every, every, every, moving)

    @property
    def opposite(self) -> RingTopology:
        """The same ring the other way round."""
        return RingTopology(self.ranks[::-1], self.stationary[::-1], self.rotating[::-1], self.moving)

    def shorter_way(self, grid: Grid) -> RingTopology:
        """This ring or the opposite one, whichever sends fewer tokens; the same choice on every rank of it.

        With causal masks and zigzag shards, keys that go down visit those who see all of them first, then those who see
        half: three quarters of what goes up. Where all see all, both ways are equal, and it is this one.
        """
        return min((self, self.opposite), key=lambda way: way.tokens_sent(grid))

    def tokens_sent(self, grid: Grid) -> int:
        """By all ranks of the ring together, as many times as they make a hop."""
        return sum(len(tokens) for steps in self.needed(grid) for tokens in steps[1:])

    def origin(self, place: int, step: int) -> int:
        """The place from which the rotating shard comes that is held at `step`."""
        return (place - step) % len(self.ranks)

    def ahead(self, place: int, steps: int) -> int:
        """The rank that is so many places further round."""
        return self.ranks[(place + steps) % len(self.ranks)]

    def needed(self, grid: Grid) -> tuple[tuple[range, ...], ...]:
        """For the rotating shard from each place: its tokens that any rank so many steps on, or further, sees.

        All of them at step 0, none at step R, and never more than the step before.
        """
        return grid.once(self, lambda: _needed(self, grid))

    def query_key_shards(self, place: int, origin: int) -> tuple[int, int]:
        """(shard of queries, shard of keys) at `place`, which holds the rotating shard from `origin`."""
        own, held = self.stationary[place], self.rotating[origin]
        return (own, held) if self.moving == "keys" else (held, own)

    def seen(self, grid: Grid, place: int, origin: int) -> range:
        """Tokens of the rotating shard from `origin` that the rank at `place` sees."""
        both = grid.hull(*self.query_key_shards(place, origin))
        return both.keys if self.moving == "keys" else both.queries

    def hops(self, grid: Grid, step: int) -> Iterator[Send]:
        """What goes on at `step`, in tokens."""
        needed = self.needed(grid)
        for place, rank in enumerate(self.ranks):
            yield Send(rank, self.ahead(place, 1), len(needed[self.origin(place, step)][step + 1]))


def _needed(ring: RingTopology, grid: Grid) -> tuple[tuple[range, ...], ...]:
    size, sizes = len(ring.ranks), (grid.key_layout if ring.moving == "keys" else grid.layout).sizes

    def of(origin: int) -> tuple[range, ...]:
        ranges = [range(0)]
        for step in range(size - 1, 0, -1):
            ranges.append(_around(ranges[-1], ring.seen(grid, (origin + step) % size, origin)))
        return (range(sizes[ring.rotating[origin]]), *reversed(ranges))

    return tuple(of(origin) for origin in range(size))


def _around(a: range, b: range) -> range:
    """The smallest range with all of both."""
    return range(min(a.start, b.start), max(a.stop, b.stop)) if a and b else a or b
