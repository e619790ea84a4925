"""Ring topologies: the order in which shards visit ranks, and how far each token travels. Pure.

Each rank of a ring has one stationary shard and one rotating shard at a time: either keys rotate and queries stay, or
queries rotate and keys stay. A rank *sees* a token of a rotating shard if the token is in a visible pair with the
rank's stationary shard. A token is sent no further than to the last rank that sees it (`Reach`). At step s a shard is
on the rank s hops after its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from armillary.attention.tiling.grid import Grid
from armillary.core import TokenRanges

RotatingSide = Literal["keys", "queries"]


@dataclass(frozen=True)
class RingTopology:
    """R ranks in a ring. `index` and `origin` in the methods below are indices of `ranks`.

    Args:
        ranks: ranks of the axis, in the order in which a rotating shard visits them.
        stationary_shards: for each of `ranks`, the shard that stays on it.
        rotating_shards: for each of `ranks`, the shard that it owns and sends around the ring.
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
        """Returns this ring or the opposite one, whichever sends fewer tokens; this one if both send as many."""
        # Under a causal mask, zigzag keys that travel towards lower ranks visit the ranks that see half of them last:
        # half of each shard stops early, after 3 / 4 of the (P - 1) N hops without a mask. The other direction makes
        # (P - 1/2) / P of them.
        # The grid is the same on every rank, so that every rank chooses alike without communication.
        reach, opposite = self.reach(grid), self.opposite
        # Derives the reaches of the opposite ring from those of this one, which is faster than `_reach`.
        grid.cached(opposite, lambda: tuple(shard.opposite for shard in reversed(reach)))
        return opposite if opposite.tokens_sent(grid) < self.tokens_sent(grid) else self

    def tokens_sent(self, grid: Grid) -> int:
        """Returns the number of tokens that all ranks send, counting a token once for each hop."""
        return sum(sum(shard.counts[1:]) for shard in self.reach(grid))

    def origin(self, index: int, step: int) -> int:
        """Returns the index of the rank that owns the rotating shard which is on rank `index` at `step`."""
        return (index - step) % len(self.ranks)

    def ahead(self, index: int, steps: int) -> int:
        """Returns the rank of the axis that is `steps` hops after rank `index` of the ring; before it if negative."""
        return self.ranks[(index + steps) % len(self.ranks)]

    def reach(self, grid: Grid) -> tuple[Reach, ...]:
        """Returns the reach of each rank's rotating shard. Cached with the grid."""
        return grid.cached(self, lambda: tuple(self._reach(grid, origin) for origin in range(len(self.ranks))))

    def _reach(self, grid: Grid, origin: int) -> Reach:
        size, layout = len(self.ranks), grid.key_layout if self.rotating_side == "keys" else grid.layout
        visible = [self.visible_tokens(grid, (origin + step) % size, origin) for step in range(1, size)]
        return Reach.of(layout.sizes[self.rotating_shards[origin]], visible)

    def query_key_shards(self, index: int, origin: int) -> tuple[int, int]:
        """Returns the (query shard, key shard) on rank `index` while it has the rotating shard of rank `origin`."""
        stationary_shard, rotating_shard = self.stationary_shards[index], self.rotating_shards[origin]
        return (
            (stationary_shard, rotating_shard) if self.rotating_side == "keys" else (rotating_shard, stationary_shard)
        )

    def visible_tokens(self, grid: Grid, index: int, origin: int) -> TokenRanges:
        """Returns the tokens of the rotating shard of rank `origin` that rank `index` sees, as indices in the shard."""
        visible = grid.visible(*self.query_key_shards(index, origin))
        return TokenRanges(visible.keys if self.rotating_side == "keys" else visible.queries)


# -- how far tokens travel ---------------------------------------------------------------------------------------------

START, STOP = attrgetter("start"), attrgetter("stop")


@dataclass(frozen=True, eq=False)
class Reach:
    """The first and the last step at which another rank sees each token of one rotating shard.

    The tokens are divided into n runs, in which all tokens have the same first and the same last step.

    Args:
        ranks: R, the number of ranks of the ring.
        ends: int64 [n + 1]; run i is tokens ends[i] .. ends[i + 1] - 1 of the shard.
        first: int64 [n], the first step of each run, 1 .. R - 1; R for a run that no other rank sees.
        last: int64 [n], the last step of each run, 1 .. R - 1; 0 for a run that no other rank sees.
    """

    ranks: int
    ends: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: int, visible: Sequence[TokenRanges]) -> Reach:
        """Returns the reach of a shard of `tokens` tokens.

        Args:
            visible: for each of steps 1 .. R - 1, the tokens that the rank with the shard sees.
        """
        ranks, runs = len(visible) + 1, [run for ranges in visible for run in ranges.runs]
        steps = np.repeat(np.arange(1, ranks), [len(ranges.runs) for ranges in visible])
        sides = np.fromiter(chain(map(START, runs), map(STOP, runs), (0, tokens)), np.int64)
        # No step starts or stops to see tokens between two neighbouring sides: the tokens between them are one run.
        ends = np.unique(sides)
        starts, stops = np.searchsorted(ends, sides[:-2]).reshape(2, -1)
        # [step, run]: +1 where a range of visible tokens starts and -1 where it stops, so that the running sum is 1
        # inside of visible ranges. The ranges of one step never touch, so no entry is written twice.
        edges = np.zeros((ranks, len(ends)), np.int8)
        edges[steps, starts], edges[steps, stops] = 1, -1
        inside = edges.cumsum(1, dtype=np.int8)[:, :-1] > 0
        is_unseen = ~inside.any(0)
        first, last = inside.argmax(0), ranks - 1 - inside[::-1].argmax(0)  # argmax finds the first True
        return cls(ranks, ends, np.where(is_unseen, ranks, first), np.where(is_unseen, 0, last))

    @property
    def opposite(self) -> Reach:
        """The reach in the opposite direction, in which a rank has the shard at step R - s instead of step s."""
        return Reach(self.ranks, self.ends, self.ranks - self.last, self.ranks - self.first)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """For each of steps 0 .. R, the number of tokens that travel so far: `tokens_at(step).count`."""
        # Adds up the tokens by their last step, then sums from the end: the tokens whose last step is `step` or later.
        sizes, counts = np.diff(self.ends), np.zeros(self.ranks + 1, np.int64)
        np.add.at(counts, self.last, sizes)
        return tuple(map(int, counts[::-1].cumsum()[::-1]))

    def tokens_at(self, step: int) -> TokenRanges:
        """Returns the tokens that a rank sees at `step` or later: all tokens for step 0, none for step R."""
        return TokenRanges.select(self.ends, self.last >= step)

    def final_tokens_at(self, step: int) -> TokenRanges:
        """Returns the tokens whose last step is `step`."""
        return TokenRanges.select(self.ends, self.last == step)
