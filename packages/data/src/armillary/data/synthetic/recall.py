"""Associative recall: many things to be remembered, and asked for later."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from armillary.core import SequenceLayout
from armillary.data.loader.batch import IGNORE
from armillary.data.loader.batches import check_least
from armillary.data.shuffle import Index, stable_hash
from armillary.data.synthetic.draws import distinct, draw
from armillary.data.synthetic.places import Places
from armillary.data.synthetic.task import checked, tensor


@dataclass(frozen=True, repr=False)
class AssociativeRecall:
    """Filler with (key, value) pairs at random places, and queries behind them: a key again, and then its value.

    Labels stand on the keys of the queries alone. No key stands in two pairs, and none is asked for twice. Values are
    drawn for every pair by itself, so who has not seen a pair is right once in `values` times. Who has seen all values
    of a row, but not which key each belongs to, is right about once in `pairs` times.

    By default the queries fill the end of the row, so all of it has to be remembered. Small models learn soonest from
    rows that ask for every pair and hold little else, such as length=64, pairs=16, queries=16. From there the same
    model can go on to longer rows.

    Args:
        length: N.
        pairs: in a row; a key and a value side by side.
        queries: in a row, at most as many as pairs.
        keys, values, fillers: how many different tokens there are of each.
        offset: the first key's number; values and fillers follow behind the keys. To embed the task in a model with a
            larger vocabulary, see that `vocab_size` is within it.
        seed: rows of other seeds are others.
        gap: at least so many tokens lie between a pair and any query.
        tail: the queries are scattered among the last `tail` tokens of the row, pairs stand before them. By default
            2 * queries, which leaves no filler between queries.
        across: no token of a pair that is asked for lies on the shard that holds the query, so attention within a
            shard can only guess. Pairs are placed by it: with another layout, rows are others.

    Raises:
        ValueError: counts below 1, more queries than pairs or pairs than keys, a negative offset or gap, a row too
            short, a layout of another length, or one that leaves no place for a pair away from its query; from
            `tokens` and `labels`, no such row or position.
    """

    length: int
    pairs: int
    queries: int
    keys: int
    values: int
    fillers: int = 32
    offset: int = 0
    seed: int = 0
    gap: int = 0
    tail: int | None = None
    across: SequenceLayout | None = None

    def __post_init__(self) -> None:
        check_least(1, queries=self.queries, values=self.values, fillers=self.fillers)
        check_least(0, offset=self.offset, gap=self.gap)
        if not self.queries <= self.pairs <= self.keys:
            raise ValueError(
                f"{self.queries} queries, {self.pairs} pairs, {self.keys} keys: a row asks for each pair once at most, "
                "and no key is in two pairs; give at least as many pairs as queries, and keys as pairs"
            )
        # Whether there are places is the same for every row.
        _drawn(self._places, self._key("places", 0))

    def __repr__(self) -> str:
        """All that decides the rows; of `across` a hash, since a layout may be long."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.across is not None:
            shown["across"] = f"{self.across.shards} shards #{stable_hash(self.across.text):016x}"
        return f"AssociativeRecall({', '.join(f'{name}={value}' for name, value in shown.items())})"

    @property
    def vocab_size(self) -> int:
        """All tokens lie below it."""
        return self.offset + self.keys + self.values + self.fillers

    def tokens(self, row: int, positions: Tensor) -> Tensor:
        """The tokens at `positions` [T] of a row: int64 [T]."""
        at = checked(self.length, row, positions)
        pair, _, second = self._find(row, at)
        filler = self.keys + self.values + draw(self._key("filler", row), at, self.fillers)
        filler[pair >= 0] = np.where(second, self._values(row, pair), self._keys(row, pair))[pair >= 0]
        return tensor(filler + self.offset)

    def labels(self, row: int, positions: Tensor) -> Tensor:
        """The value on each of `positions` [T] where a query's key stands, else `IGNORE`: int64 [T]."""
        pair, is_query, second = self._find(row, checked(self.length, row, positions))
        return tensor(np.where(is_query & ~second, self._values(row, pair) + self.offset, IGNORE))

    @property
    def _places(self) -> Places:
        return Places(self.length, self.pairs, self.queries, self.gap, self.tail, self.across)

    def _find(self, row: int, at: Index) -> tuple[Index, NDArray[np.bool_], NDArray[np.bool_]]:
        """The pair that each position belongs to or asks for, or -1; whether it asks; whether it holds the value."""
        stored, asking = _drawn(self._places, self._key("places", row))
        marked = np.concatenate([stored, asking])
        order = np.argsort(marked)
        place, second = self._places.locate(at)
        nearest = order[np.searchsorted(marked, place, sorter=order).clip(max=len(marked) - 1)]
        pair = np.where(marked[nearest] == place, nearest, -1)
        asks = pair >= self.pairs
        return np.where(asks, pair - self.pairs, pair), asks, second == 1

    def _keys(self, row: int, pair: Index) -> Index:
        return distinct(self._key("keys", row), self.keys, self.pairs)[pair]

    def _values(self, row: int, pair: Index) -> Index:
        return self.keys + draw(self._key("values", row), pair, self.values)

    def _key(self, what: str, row: int) -> str:
        return f"recall's {what}, row {row}, seed {self.seed}"


# A row's tokens and labels are asked for one after the other.
@lru_cache(maxsize=16)
def _drawn(places: Places, key: str) -> tuple[Index, Index]:
    return places.draw(key)
