"""Where in a row of associative recall the pairs and the queries stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.core import SequenceLayout
from armillary.data.shuffle import Index
from armillary.data.synthetic.cross_shard import Matching, owners
from armillary.data.synthetic.draws import distinct


@dataclass(frozen=True)
class Places:
    """Places for pairs, and behind them for queries. A place is two tokens; the row ends with one.

    The first token of a row of odd length belongs to none.

    Args:
        length, pairs, queries, gap, tail, across: as in `AssociativeRecall`.

    Raises:
        ValueError: a tail too short for the queries, a row too short, a layout of another length.
    """

    length: int
    pairs: int
    queries: int
    gap: int
    tail: int | None
    across: SequenceLayout | None

    def __post_init__(self) -> None:
        if self._behind < self.queries:
            least = 2 * self.queries
            raise ValueError(f"tail={self.tail} is too short for {self.queries} queries of 2 tokens; give {least}")
        if self._before < self.pairs:
            least = 2 * (self.pairs + self._between + self._behind)
            raise ValueError(
                f"a row of {self.length} tokens is too short for {self.pairs} pairs of 2 tokens, a gap of {self.gap} "
                f"and a tail of {2 * self._behind}; give at least {least}"
            )
        if self.across is not None and self.across.length != self.length:
            raise ValueError(f"across is a layout of {self.across.length} tokens; the row has {self.length}")

    def draw(self, key: str) -> tuple[Index, Index]:
        """Different places of pairs [pairs] and of queries [queries]; query i asks for pair i. Work is O(pairs).

        Raises:
            ValueError: `across` leaves no place for a pair away from its query; the same whatever the key.
        """
        if self.across is None:
            return self._candidates(key, self.pairs, self.queries)
        before, behind = 2 * self.pairs, self.queries
        while (found := self._choose(*self._candidates(key, before, behind))) is None:
            if before >= self._before and behind >= self._behind:
                raise ValueError(
                    f"{self.across} has no places for {self.queries} pairs of 2 tokens, none of them on its query's "
                    "shard; give fewer queries, more tokens, or longer runs of positions to more shards"
                )
            before, behind = 2 * before, 2 * behind
        return found

    def positions(self, places: Index) -> Index:
        """Where the first token of each place stands."""
        return self.length % 2 + 2 * places

    def locate(self, positions: Index) -> tuple[Index, Index]:
        """The place of each position, and whether it is the first token (0) or the second (1)."""
        return np.divmod(positions - self.length % 2, 2)

    @property
    def _behind(self) -> int:
        """Places that a query may take: the last ones."""
        return self.queries if self.tail is None else self.tail // 2

    @property
    def _between(self) -> int:
        """Places of the gap, which nothing may take."""
        return (self.gap + 1) // 2

    @property
    def _before(self) -> int:
        """Places that a pair may take: the first ones."""
        return self.length // 2 - self._behind - self._between

    def _candidates(self, key: str, before: int, behind: int) -> tuple[Index, Index]:
        """So many places for pairs, and for queries, or all that there are; in random order."""
        pairs = distinct(f"{key}, pairs", self._before, min(before, self._before))
        queries = distinct(f"{key}, queries", self._behind, min(behind, self._behind))
        return pairs, queries + self.length // 2 - self._behind

    def _choose(self, pairs: Index, queries: Index) -> tuple[Index, Index] | None:
        """Of such candidates those that `across` allows, or None where they are too few."""
        assert self.across is not None
        shard = owners(self.across)
        keys = self.positions(pairs)
        matched = Matching(shard.of(self.positions(queries)), shard.of(np.stack([keys, keys + 1]))).pairs
        asking = np.flatnonzero(matched >= 0)[: self.queries]
        if len(asking) < self.queries:
            return None
        asked = matched[asking]
        others = np.delete(pairs, asked)[: self.pairs - self.queries]
        return np.concatenate([pairs[asked], others]), queries[asking]
