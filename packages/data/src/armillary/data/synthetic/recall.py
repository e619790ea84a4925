"""Associative recall: many (key, value) pairs, then queries for all keys at the end of the row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from armillary.core import SequenceLayout
from armillary.data.loader.batches import check_minimum
from armillary.data.shuffle import Index, permutation, stable_hash
from armillary.data.synthetic.cross_shard import match_pairs
from armillary.data.synthetic.task import Task, draw


@dataclass(frozen=True, repr=False)
class AssociativeRecall(Task):
    """Filler with (key, value) pairs at random places; the row ends with a query for each: its key, then its value.

    The values of the queries are the labels. No key occurs in two pairs. The value of each pair is drawn independently,
    so a guess is right with probability 1 / values, or about 1 / pairs if a model knows which values the row has, but
    not their keys.

    Small models learn fastest from rows with many pairs and little filler, such as length=64, pairs=16.

    Args:
        length: N.
        pairs: number of pairs, and of queries, in a row.
        keys, values, fillers: number of different tokens of each kind.
        seed: seed of random tokens and places.
        across: a layout in which no token of a pair is on the shard of its query, so that attention within a shard can
            only guess. The places of pairs depend on it. None: any places.

    Raises:
        ValueError: counts below 1, more pairs than keys, a row that is too short, a layout of another length, or a
            layout with a pair that cannot be placed on other shards than its query.
    """

    length: int
    pairs: int
    keys: int
    values: int
    fillers: int = 32
    seed: int = 0
    across: SequenceLayout | None = None

    def __post_init__(self) -> None:
        check_minimum(1, pairs=self.pairs, values=self.values, fillers=self.fillers)
        if self.pairs > self.keys:
            raise ValueError(
                f"pairs must be at most keys ({self.keys}), since each has a key of its own; got {self.pairs}"
            )
        if self.length < 4 * self.pairs:
            raise ValueError(
                f"a row of {self.length} tokens is too short for {self.pairs} pairs and queries of 2 tokens each; give "
                f"at least {4 * self.pairs}"
            )
        if self.across is not None and self.across.length != self.length:
            raise ValueError(f"across is a layout of {self.across.length} tokens; the row has {self.length}")
        _places(self, 0)  # raises if `across` has no places for the pairs; every row would raise

    def __repr__(self) -> str:
        """Names all fields, with a hash of `across`, whose text may be long."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.across is not None:
            values["across"] = f"{self.across.shards} shards #{stable_hash(self.across.text):016x}"
        return f"AssociativeRecall({', '.join(f'{name}={value}' for name, value in values.items())})"

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.fillers

    def _key(self, kind: str, row: int) -> str:
        return f"recall's {kind}, row {row}, seed {self.seed}"

    def _tokens(self, row: int, positions: Index) -> Index:
        # A place is two adjacent tokens, a key and a value. In rows of odd length, token 0 belongs to none.
        place, offset = np.divmod(positions - self.length % 2, 2)
        # The places of pairs, then of queries: entry i and entry `pairs` + i belong to the same pair. `nearest` is the
        # entry with the smallest place that is at least each position's place.
        places = np.concatenate(_places(self, row))
        order = np.argsort(places)
        nearest = order[np.searchsorted(places, place, sorter=order).clip(max=len(places) - 1)]
        pair = nearest % self.pairs
        key = _distinct(self._key("keys", row), self.keys, self.pairs)[pair]
        value = self.keys + draw(self._key("values", row), pair, self.values)
        filler = self.keys + self.values + draw(self._key("filler", row), positions, self.fillers)
        # Positions whose place is no entry are filler.
        return np.where(places[nearest] == place, np.where(offset == 1, value, key), filler)

    def _asks(self, positions: Index) -> npt.NDArray[np.bool_]:
        return (positions >= self.length - 2 * self.pairs) & ((positions - self.length) % 2 == 0)


@lru_cache(maxsize=16)  # tokens and labels of a row are computed one after the other
def _places(task: AssociativeRecall, row: int) -> tuple[Index, Index]:
    """Returns the places of the pairs and of their queries in a row, int64 [pairs] each. Work is O(pairs), not O(N).

    Raises:
        ValueError: `task.across` has no places for all pairs on other shards than their queries.
    """
    key, count = f"recall's places, row {row}, seed {task.seed}", task.pairs
    room = task.length // 2 - count  # number of places before the queries
    queries = room + permutation(count, f"{key}, queries")
    if task.across is None:
        return _distinct(f"{key}, pairs", room, count), queries
    query_shards = task.across.shards_at(task.length % 2 + 2 * queries)
    candidates = count
    while True:
        # Doubles the number of candidates until every query has a pair. Most rows need only the first iteration.
        candidates = min(2 * candidates, room)
        pairs = _distinct(f"{key}, pairs", room, candidates)
        key_positions = task.length % 2 + 2 * pairs
        matches = match_pairs(query_shards, task.across.shards_at(np.stack([key_positions, key_positions + 1])))
        if (matches >= 0).all():
            return pairs[matches], queries
        if candidates == room:
            break
    raise ValueError(
        f"{task.across} has no places for {count} pairs of 2 tokens, none of them on its query's shard; give fewer "
        "pairs, more tokens, or longer runs of positions to more shards"
    )


def _distinct(key: str, n: int, count: int) -> Index:
    """Returns `count` different numbers below `n` >= count in random order. Work is O(count), not O(n)."""
    if 2 * count >= n:
        return permutation(n, key)[:count]
    size = 2 * count
    while True:
        # Draws more numbers than needed, and keeps the first occurrence of each, in the order of the draws.
        numbers = draw(key, np.arange(size), n)
        first = np.sort(np.unique(numbers, return_index=True)[1])
        if len(first) >= count:
            return numbers[first[:count]]
        size *= 2
