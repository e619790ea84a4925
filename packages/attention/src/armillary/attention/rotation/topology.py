"""Ring topologies: the order in which shards visit ranks, and how far each token travels. Pure.

On every rank of a ring one shard is stationary and the shards of the other side rotate past it: keys past queries, or
queries past keys. A token is sent no further than to the last rank that sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from armillary.attention.rotation.reach import Reach
from armillary.attention.tiling.grid import Grid
from armillary.core import TokenRanges

RotatingSide = Literal["keys", "queries"]


@dataclass(frozen=True)
class RingTopology:
    """R ranks in a ring. Methods number them by their index in `ranks`.

    Args:
        ranks: ranks of the axis, in the order in which a rotating shard visits them.
        stationary_shards: the shard that stays on each of `ranks`.
        rotating_shards: the shard that each of `ranks` owns and sends around the ring.
        rotating_side: the side whose shards rotate.
    """

    ranks: tuple[int, ...]
    stationary_shards: tuple[int, ...]
    rotating_shards: tuple[int, ...]
    rotating_side: RotatingSide

    @classmethod
    def of_all(cls, ranks: int, rotating_side: RotatingSide) -> RingTopology:
        """Returns one ring of all ranks of an axis, each with its own shard."""
        all_ranks = tuple(range(ranks))
        return cls(all_ranks, all_ranks, all_ranks, rotating_side)

    @property
    def opposite(self) -> RingTopology:
        """The same ring, turning in the opposite direction."""
        return RingTopology(
            self.ranks[::-1], self.stationary_shards[::-1], self.rotating_shards[::-1], self.rotating_side
        )

    def cheaper_direction(self, grid: Grid) -> RingTopology:
        """Returns this ring or the opposite one, whichever sends fewer tokens. Every rank chooses alike.

        With a causal mask and zigzag shards, keys that travel to lower ranks first meet the ranks that see all of them
        and then those that see half: three quarters of the tokens sent the other way. On a tie this ring is returned.
        """
        # Counted over all ranks from the grid, which is the same everywhere: no communication decides it.
        reach, opposite = self.reach(grid), self.opposite
        grid.cached(opposite, lambda: tuple(shard.opposite for shard in reversed(reach)))  # cheaper than `reach`
        return opposite if opposite.tokens_sent(grid) < self.tokens_sent(grid) else self

    def tokens_sent(self, grid: Grid) -> int:
        """Returns the number of tokens that all ranks send, counting a token once for each hop."""
        return sum(sum(shard.counts[1:]) for shard in self.reach(grid))

    def origin(self, index: int, step: int) -> int:
        """Returns the index of the owner of the rotating shard that is on rank `index` at `step`."""
        return (index - step) % len(self.ranks)

    def ahead(self, index: int, steps: int) -> int:
        """Returns the rank of the axis that is `steps` hops after rank `index` of the ring."""
        return self.ranks[(index + steps) % len(self.ranks)]

    def reach(self, grid: Grid) -> tuple[Reach, ...]:
        """Returns the reach of the rotating shard of each rank of the ring."""
        return grid.cached(self, lambda: tuple(self._reach(grid, origin) for origin in range(len(self.ranks))))

    def _reach(self, grid: Grid, origin: int) -> Reach:
        size, layout = len(self.ranks), grid.key_layout if self.rotating_side == "keys" else grid.layout
        visible = [self.visible_tokens(grid, (origin + step) % size, origin) for step in range(1, size)]
        return Reach.of(layout.sizes[self.rotating_shards[origin]], visible)

    def query_key_shards(self, index: int, origin: int) -> tuple[int, int]:
        """Returns the (query shard, key shard) that meet on rank `index` when the shard of rank `origin` is there."""
        stationary_shard, rotating_shard = self.stationary_shards[index], self.rotating_shards[origin]
        return (
            (stationary_shard, rotating_shard) if self.rotating_side == "keys" else (rotating_shard, stationary_shard)
        )

    def visible_tokens(self, grid: Grid, index: int, origin: int) -> TokenRanges:
        """Returns the tokens of the shard of rank `origin` that are in a visible pair on rank `index`."""
        visible = grid.visible(*self.query_key_shards(index, origin))
        return TokenRanges(visible.keys if self.rotating_side == "keys" else visible.queries)
