"""Associative recall across ranks: rows of (key, value) pairs whose last tokens ask for values on other ranks.

The trainer runs on these rows like on any other: `prepare_recall` puts them in place of a run's text. `right_answers`
counts right answers on held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from armillary.core import SequenceLayout, to_device
from armillary.data import IGNORE, Batch, Batches
from armillary.data.packing import permutation
from armillary.data.store import Index, random_bits
from armillary.models import linear_argmax
from armillary.models.block import Block
from armillary.train import Config, Run, prepare
from armillary.train.loop import mean_over_rows
from armillary.train.step import forward

FIRST_HELD_OUT_ROW = 2**40
"""Training reads rows from number 0 on, validation from this number on."""


@dataclass(frozen=True)
class Recall:
    """Filler with (key, value) pairs at random places; the row ends with a query for each: its key, then its value.

    The values of the queries are the labels. No key occurs in two pairs, and no token of a pair is on the shard of its
    query. So attention within a shard can only guess, and is right with probability 1 / symbols. Every token is a
    function of (seed, row, position): a rank computes its own, and nothing is stored or sent.

    Args:
        layout: layout of the N tokens of a row. The places of pairs depend on it.
        pairs: number of pairs, and of queries, in a row.
        symbols: number of different keys, of values and of fillers.

    Raises:
        ValueError: more pairs than symbols, a row shorter than its pairs and queries, or a layout with a pair that
            cannot be placed on other shards than its query.
    """

    layout: SequenceLayout
    pairs: int
    symbols: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.symbols:
            raise ValueError(f"pairs={self.pairs} must lie in 1..{self.symbols}, since each has a key of its own")
        if self.layout.length < 4 * self.pairs:
            raise ValueError(f"{self.layout} is too short for {self.pairs} pairs and queries of 2 tokens each")
        places_of(self, 0)  # raises if there are no places for the pairs; every row would raise

    @property
    def vocabulary(self) -> int:
        return 3 * self.symbols

    def tokens(self, row: int, positions: Index) -> Index:
        """Returns the tokens at `positions` [T] of a row: int64 [T]."""
        # A place is two adjacent tokens, a key and a value. In rows of odd length, token 0 belongs to none.
        place, offset = np.divmod(positions - self.layout.length % 2, 2)
        # The places of pairs, then of queries: entry i and entry `pairs` + i belong to the same pair. `nearest` is the
        # entry with the smallest place that is at least each position's place.
        places = np.concatenate(places_of(self, row))
        order = np.argsort(places)
        nearest = order[np.searchsorted(places, place, sorter=order).clip(max=len(places) - 1)]
        pair = nearest % self.pairs
        key = distinct(self._key("keys", row), self.symbols, self.pairs)[pair]
        value = self.symbols + draw(self._key("values", row), pair, self.symbols)
        filler = 2 * self.symbols + draw(self._key("filler", row), positions, self.symbols)
        # Positions whose place is no entry are filler.
        return np.where(places[nearest] == place, np.where(offset == 1, value, key), filler)

    def labels(self, row: int, positions: Index) -> Index:
        """Returns the next token at each of `positions` [T] that asks for it, else `IGNORE`: int64 [T]."""
        length = self.layout.length
        asks = (positions >= length - 2 * self.pairs) & ((positions - length) % 2 == 0)
        return np.where(asks, self.tokens(row, np.minimum(positions + 1, length - 1)), IGNORE)

    def _key(self, kind: str, row: int) -> str:
        return f"recall's {kind}, row {row}, seed {self.seed}"


@lru_cache(maxsize=16)  # tokens and labels of a row are computed one after the other
def places_of(task: Recall, row: int) -> tuple[Index, Index]:
    """Returns the places of the pairs and of their queries in a row, int64 [pairs] each. Work is O(pairs), not O(N).

    Raises:
        ValueError: the layout has no places for all pairs on other shards than their queries.
    """
    key, count, layout = f"recall's places, row {row}, seed {task.seed}", task.pairs, task.layout
    room = layout.length // 2 - count  # number of places before the queries
    queries = room + permutation(count, f"{key}, queries")
    if layout.shards == 1:
        return distinct(f"{key}, pairs", room, count), queries
    query_shards = layout.shards_at(layout.length % 2 + 2 * queries)
    candidates = count
    while True:
        # Doubles the number of candidates until every query has a pair. Most rows need only the first iteration.
        candidates = min(2 * candidates, room)
        pairs = distinct(f"{key}, pairs", room, candidates)
        key_positions = layout.length % 2 + 2 * pairs
        matches = match_pairs(query_shards, layout.shards_at(np.stack([key_positions, key_positions + 1])))
        if (matches >= 0).all():
            return pairs[matches], queries
        if candidates == room:
            raise ValueError(f"{layout} has no places for {count} pairs of 2 tokens on other shards than their queries")


def match_pairs(query_shards: Index, pair_shards: Index) -> Index:
    """Returns for each query a pair without a token on the query's shard, or -1: int64 [q].

    No pair belongs to two queries. As many queries as possible get a pair. Work is O(shards * (q + c)), unless pairs
    are scarce.

    Args:
        query_shards: int64 [q], the shard of each query.
        pair_shards: int64 [2, c], the shards of each pair's key and value. Pairs with lower numbers are preferred.
    """
    pairs: Index = np.full(len(query_shards), -1, np.int64)
    free = np.ones(pair_shards.shape[1], bool)

    def free_elsewhere(shard: int) -> Index:
        """Returns the free pairs without a token on `shard`."""
        return np.flatnonzero(free & (pair_shards != shard).all(0))

    def augment(shard: int, visited_shards: set[int]) -> int:
        """Returns a pair for a query on `shard`, or -1, by an augmenting path of bipartite matching.

        If no suitable pair is free, a query on another shard releases its pair and gets another one instead, by the
        same search. All queries of a shard accept the same pairs, so each shard is visited once.
        """
        visited_shards.add(shard)
        if len(candidates := free_elsewhere(shard)):
            free[candidates[0]] = False
            return int(candidates[0])
        usable = (pairs >= 0) & (pair_shards[:, pairs] != shard).all(0)
        for donor_shard in np.unique(query_shards[usable]).tolist():
            if donor_shard not in visited_shards and (replacement := augment(donor_shard, visited_shards)) >= 0:
                donor = np.flatnonzero(usable & (query_shards == donor_shard))[0]
                released_pair, pairs[donor] = int(pairs[donor]), replacement
                return released_pair
        return -1

    # 1. Greedy: the queries of each shard take suitable pairs as long as any are free.
    for shard in np.unique(query_shards):
        queries = np.flatnonzero(query_shards == shard)
        chosen_pairs = free_elsewhere(shard)[: len(queries)]
        pairs[queries[: len(chosen_pairs)]] = chosen_pairs
        free[chosen_pairs] = False
    # 2. For the remaining queries, pairs are exchanged.
    for shard in np.unique(query_shards[pairs < 0]):
        for query in np.flatnonzero((query_shards == shard) & (pairs < 0)):
            pairs[query] = augment(shard, set())
            if pairs[query] < 0:
                break  # other queries of this shard would fail too
    return pairs


def distinct(key: str, n: int, count: int) -> Index:
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


def draw(key: str, indices: Index, n: int) -> Index:
    """Returns a random number in 0..n - 1 for each of `indices`, int64: a hash of the key and the index."""
    return (random_bits(key, indices) % np.uint64(n)).astype(np.int64)


class RecallRows(Batches):
    """This rank's shard of batches of recall, from row `first_row` on. All ranks share each row."""

    def __init__(self, task: Recall, shard: int, rows_per_batch: int, first_row: int) -> None:
        self._task, self._first_row = task, first_row
        settings = {"recall": repr(task), "first_row": first_row}
        super().__init__(task.layout, shard, rows_per_batch, replica=0, replicas=1, ahead=2, settings=settings)

    def _make_batch(self, rows: range) -> Batch:
        positions = self._positions.numpy()
        numbers = [self._first_row + row for row in rows]
        return Batch(
            tokens=torch.from_numpy(np.stack([self._task.tokens(row, positions) for row in numbers])),
            labels=torch.from_numpy(np.stack([self._task.labels(row, positions) for row in numbers])),
            positions=self._positions.repeat(len(rows), 1),
            documents=((0, self._layout.length),) * len(rows),
            layout=self._layout,
            rows=rows,
        )

    def describe(self, row: int) -> str:
        return f"row {self._first_row + row} of recall"


# -- training ---------------------------------------------------------------------------------------------------------


def recall_config(config: Config, symbols: int, folder: Path) -> Config:
    """Returns the configuration of a run with the vocabulary of recall, and a store in `folder` in place of text."""
    from datasets import Dataset

    Dataset.from_dict({"input_ids": [[0] * config.data.sequence_length] * 100}).save_to_disk(folder)
    data, model = replace(config.data, path=(folder,)), replace(config.model, vocab_size=3 * symbols)
    return replace(config, data=data, model=model)


def prepare_recall(config: Config, pairs: int, symbols: int, device: torch.device) -> Run:
    """Returns a run of a `recall_config` whose rows are of recall. All ranks, which share each row, must call it."""
    run = prepare(config, device)
    attention = next(module.attention for module in run.model.modules() if isinstance(module, Block))
    layout = attention.layout(config.data.sequence_length, config.data.layout)
    task = Recall(layout, pairs, symbols, config.train.seed)
    run.training, run.validation = (
        RecallRows(task, attention.shard, config.rows_per_batch, first_row) for first_row in (0, FIRST_HELD_OUT_ROW)
    )
    return run


def right_answers(run: Run) -> float:
    """Returns the share of questions in held-out rows whose most likely next token is the right one."""

    def count_answers(batch: Batch) -> tuple[Tensor, Tensor]:
        labels = to_device(batch.labels, run.device)
        asked = labels != IGNORE
        return ((forward(run, batch, linear_argmax) == labels) & asked).sum(), asked.sum()

    with torch.no_grad():
        return mean_over_rows(run, run.validation, count_answers)
