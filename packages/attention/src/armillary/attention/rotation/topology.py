"""Who passes what to whom round a ring of ranks, and how much of it: pure, for the loop and for its plan.

On every rank of a ring one shard is stationary and the others rotate past it: keys past queries, or queries past keys.
Of a rotating shard, no token is sent further than to the last rank that sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from armillary.attention.rotation.reach import Reach
from armillary.attention.tiling.grid import Grid
from armillary.core.network import Send
from armillary.core.token_ranges import TokenRanges

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
        reach, opposite = self.reach(grid), self.opposite
        other = grid.once(opposite, lambda: tuple(shard.opposite for shard in reversed(reach)))
        return opposite if _sent(other) < _sent(reach) else self

    def tokens_sent(self, grid: Grid) -> int:
        """By all ranks of the ring together, as many times as they make a hop."""
        return _sent(self.reach(grid))

    def origin(self, place: int, step: int) -> int:
        """The place from which the rotating shard comes that is held at `step`."""
        return (place - step) % len(self.ranks)

    def ahead(self, place: int, steps: int) -> int:
        """The rank that is so many places further round."""
        return self.ranks[(place + steps) % len(self.ranks)]

    def reach(self, grid: Grid) -> tuple[Reach, ...]:
        """How far the tokens of the rotating shard from each place go."""
        return grid.once(self, lambda: tuple(self._reach(grid, origin) for origin in range(len(self.ranks))))

    def _reach(self, grid: Grid, origin: int) -> Reach:
        size, layout = len(self.ranks), grid.key_layout if self.moving == "keys" else grid.layout
        seen = [self.seen(grid, (origin + step) % size, origin) for step in range(1, size)]
        return Reach.of(layout.sizes[self.rotating[origin]], seen)

    def query_key_shards(self, place: int, origin: int) -> tuple[int, int]:
        """(shard of queries, shard of keys) at `place`, which holds the rotating shard from `origin`."""
        own, held = self.stationary[place], self.rotating[origin]
        return (own, held) if self.moving == "keys" else (held, own)

    def seen(self, grid: Grid, place: int, origin: int) -> TokenRanges:
        """Tokens of the rotating shard from `origin` that the rank at `place` sees."""
        both = grid.seen(*self.query_key_shards(place, origin))
        return TokenRanges(both.keys if self.moving == "keys" else both.queries)

    def hops(self, grid: Grid, step: int) -> Iterator[Send]:
        """What goes on at `step`, in tokens."""
        reach = self.reach(grid)
        for place, rank in enumerate(self.ranks):
            yield Send(rank, self.ahead(place, 1), reach[self.origin(place, step)].counts[step + 1])


def _sent(reach: Iterable[Reach]) -> int:
    return sum(sum(shard.counts[1:]) for shard in reach)
