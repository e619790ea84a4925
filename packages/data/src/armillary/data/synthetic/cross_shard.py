"""Asking for what another shard holds: which pairs may be asked for where."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from armillary.core import SequenceLayout
from armillary.data.shuffle import Index


class Owners:
    """Which shard of a layout holds a position; memory is O(spans), not O(N)."""

    def __init__(self, layout: SequenceLayout) -> None:
        spans = [(span, shard) for shard in range(layout.shards) for span in layout.spans(shard)]
        runs = sorted((span.start, shard) for span, shard in spans if span.step == 1)
        self._starts = np.array([start for start, _ in runs], np.int64)
        self._shards = np.array([shard for _, shard in runs], np.int64)
        self._strided = [(span, shard) for span, shard in spans if span.step > 1]

    def of(self, positions: Index) -> Index:
        """The shard that holds each of `positions`, of any shape."""
        found = np.zeros_like(positions)
        if len(self._starts):
            # The last run that starts before a position holds it, unless a strided one does.
            found = self._shards[np.searchsorted(self._starts, positions, side="right") - 1]
        for span, shard in self._strided:
            inside = (positions >= span.start) & (positions < span.stop)
            found[inside & (positions % span.step == span.start % span.step)] = shard
        return found


# Asked for every row of a run; a layout of a million stripes takes a while.
@lru_cache(maxsize=16)
def owners(layout: SequenceLayout) -> Owners:
    """Which shard of `layout` holds a position."""
    return Owners(layout)


class Matching:
    """A pair for each query, no token of which lies on the query's shard; each pair is asked for once.

    As many queries get one as can. Work is O(shards * (q + c)), unless pairs are scarce.

    Args:
        asking: [q], the shard of each query.
        holding: [2, c], the shards of each pair's key and value; earlier pairs are taken first.
    """

    def __init__(self, asking: Index, holding: Index) -> None:
        self._asking, self._holding = asking, holding
        self._free = np.ones(holding.shape[1], bool)
        self.pairs: Index = np.full(len(asking), -1, np.int64)
        """[q], which pair each query got, or -1."""
        for shard in np.unique(asking):
            self._take(shard)
        for shard in np.unique(asking[self.pairs < 0]):
            self._take_from_others(shard)

    def _elsewhere(self, shard: int) -> Index:
        """Free pairs that don't touch `shard`."""
        return np.flatnonzero(self._free & (self._holding != shard).all(0))

    def _take(self, shard: int) -> None:
        """Gives the queries on `shard` what they may have, as long as it lasts."""
        queries = np.flatnonzero(self._asking == shard)
        pairs = self._elsewhere(shard)[: len(queries)]
        self.pairs[queries[: len(pairs)]] = pairs
        self._free[pairs] = False

    def _take_from_others(self, shard: int) -> None:
        for query in np.flatnonzero((self._asking == shard) & (self.pairs < 0)):
            self.pairs[query] = pair = self._release(shard, set())
            if pair < 0:
                return  # nor is there one for the other queries on this shard

    def _release(self, shard: int, tried: set[int]) -> int:
        """A pair for a query on `shard`: a free one, or another query's who can have another one. -1: there is none.

        An augmenting path of bipartite matching. All queries on a shard may have the same pairs, so each shard needs
        to be tried once.
        """
        tried.add(shard)
        if len(spare := self._elsewhere(shard)):
            self._free[spare[0]] = False
            return int(spare[0])
        usable = (self.pairs >= 0) & (self._holding[:, self.pairs] != shard).all(0)
        for other in np.unique(self._asking[usable]).tolist():
            if other not in tried and (pair := self._release(other, tried)) >= 0:
                query = np.flatnonzero(usable & (self._asking == other))[0]
                held, self.pairs[query] = int(self.pairs[query]), pair
                return held
        return -1
