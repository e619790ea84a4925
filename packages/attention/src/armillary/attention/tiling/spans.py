"""Where the slices of a mask meet the spans of shards: all tiles of a shard's queries at once, as arrays.

A slice cut by a span of queries and a span of keys is one tile: bounds on positions are bounds on local indices, where
both spans have one step. Slices are many and spans few, so each step here is done for all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from armillary.core import SequenceLayout
from armillary.core.layout import Spans
from armillary.core.slices import FAR, Integers, Slices

TileArray = NDArray[np.int64]
"""[n, 7]: the shard of the keys, and q0, q1, k0, k1, low, high as of `Tile`, -FAR and FAR where those are None."""


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Runs of positions of some shards, sorted by their starts.

    Args:
        shard: of each run.
        at: the local index of its first token.
        start, stop, step, count: its positions: the last one is before `stop`.
        reach: where the last of a run and those before it ends: runs with steps may lie in each other.
    """

    shard: Integers
    at: Integers
    start: Integers
    stop: Integers
    step: Integers
    count: Integers
    reach: Integers

    @classmethod
    def of(cls, shards: Iterable[Spans]) -> SpanTable:
        rows = list[tuple[int, ...]]()
        for shard, spans in enumerate(shards):
            at = 0
            for span in spans:
                rows.append((shard, at, span.start, span[-1] + 1, span.step, len(span)))
                at += len(span)
        table = np.array(sorted(rows, key=lambda row: row[2]), dtype=np.int64).T
        return cls(*table, reach=np.maximum.accumulate(table[3]))

    def meeting(self, starts: Integers, stops: Integers) -> tuple[Integers, Integers]:
        """For runs of positions, the spans that may overlap them: (run, span) for each such pair."""
        first, last = np.searchsorted(self.reach, starts, side="right"), np.searchsorted(self.start, stops)
        run, within = repeated(np.maximum(last - first, 0))
        return run, first[run] + within


@dataclass(frozen=True, eq=False)
class Runs:
    """Parts of spans: local index of the first token, its position, the step, and how many tokens."""

    at: Integers
    position: Integers
    step: Integers
    count: Integers

    @classmethod
    def within(cls, table: SpanTable, span: Integers, start: Integers, stop: Integers) -> Runs:
        """What lies in start..stop - 1 of each of these spans."""
        step, first = table.step[span], table.start[span]
        low = np.maximum(0, -((first - start) // step))
        high = np.minimum(table.count[span], -((first - stop) // step))
        return cls(table.at[span] + low, first + low * step, step, high - low)

    def __getitem__(self, which: NDArray[np.bool_] | Integers) -> Runs:
        return Runs(self.at[which], self.position[which], self.step[which], self.count[which])

    def token(self, index: Integers, some: NDArray[np.bool_]) -> Runs:
        """One token of each of some runs; the others as they are."""
        at, position = self.at + np.where(some, index, 0), self.position + np.where(some, index * self.step, 0)
        return Runs(at, position, self.step, np.where(some, 1, self.count))


@lru_cache(maxsize=16)
def all_spans(layout: SequenceLayout) -> SpanTable:
    """The spans of all shards."""
    return SpanTable.of(layout.spans(shard) for shard in range(layout.shards))


def tile_array(queries: SpanTable, keys: SpanTable, slices: Slices) -> TileArray:
    """What the queries of one shard see of all keys: trimmed tiles, in order of the keys' shards and of rows."""
    of, span = queries.meeting(slices[:, 0], slices[:, 1])
    q0, q1, k0, k1, low, high = slices[of].T
    rows = Runs.within(queries, span, q0, q1)
    last = rows.position + (rows.count - 1) * rows.step
    starts, stops = np.maximum(k0, rows.position + low), np.minimum(k1, last + high + 1)
    some = (rows.count > 0) & (starts < stops)
    rows, low, high, starts, stops = rows[some], low[some], high[some], starts[some], stops[some]

    run, span = keys.meeting(starts, stops)
    columns, rows = Runs.within(keys, span, starts[run], stops[run]), rows[run]
    shard, low, high = keys.shard[span], low[run], high[run]
    some = columns.count > 0
    rows, columns, shard, low, high = rows[some], columns[some], shard[some], low[some], high[some]
    return _trimmed(*_of_one_step(rows, columns, shard, low, high))


def _of_one_step(
    rows: Runs, columns: Runs, shard: Integers, low: Integers, high: Integers
) -> tuple[Runs, Runs, Integers, Integers, Integers]:
    """Spans of unequal steps have no band: the shorter one goes token by token. Right, if slow."""
    unequal = (rows.step != columns.step) & (rows.count > 1) & (columns.count > 1)
    if not unequal.any():
        return rows, columns, shard, low, high
    pair, index = repeated(np.where(unequal, np.minimum(rows.count, columns.count), 1))
    rows, columns, unequal = rows[pair], columns[pair], unequal[pair]
    shorter = rows.count <= columns.count
    rows, columns = rows.token(index, unequal & shorter), columns.token(index, unequal & ~shorter)
    return rows, columns, shard[pair], low[pair], high[pair]


def _trimmed(rows: Runs, columns: Runs, shard: Integers, low: Integers, high: Integers) -> TileArray:
    """Query a is at position rows.position + a * step, key b likewise: bounds on positions are bounds on b - a."""
    step = np.where(rows.count > 1, rows.step, columns.step)
    apart, shift = columns.position - rows.position, columns.at - rows.at
    low = np.where(low == -FAR, -FAR, shift - (apart - np.maximum(low, -FAR // 2)) // step)
    high = np.where(high == FAR, FAR, shift + (np.minimum(high, FAR // 2) - apart) // step)
    q0, q1, k0, k1 = rows.at, rows.at + rows.count, columns.at, columns.at + columns.count
    q0, q1 = np.maximum(q0, k0 - high), np.minimum(q1, k1 - low)
    k0, k1 = np.maximum(k0, q0 + low), np.minimum(k1, q1 + high)
    low, high = np.where(low <= k0 - (q1 - 1), -FAR, low), np.where(high >= (k1 - 1) - q0, FAR, high)
    some = (q0 < q1) & (k0 < k1) & (low <= high)
    found = np.stack((shard, q0, q1, k0, k1, low, high), axis=1)[some]
    return found[np.lexsort((found[:, 3], found[:, 1], found[:, 0]))]


def areas(tiles: TileArray) -> Integers:
    """Visible pairs of each tile."""
    _, q0, q1, k0, k1, low, high = tiles.T
    rows, columns, shift = q1 - q0, k1 - k0, k0 - q0
    low, high = np.maximum(low - shift, 1 - rows), np.minimum(high - shift, columns - 1)
    return _up_to(high, rows, columns) - _up_to(low - 1, rows, columns)


def _up_to(high: Integers, rows: Integers, columns: Integers) -> Integers:
    """Pairs of a rectangle with b - a <= high: row after row one more, from none to all columns."""

    def rising(last: Integers) -> Integers:
        whole = np.clip(last, 0, columns)
        return whole * (whole + 1) // 2 + np.maximum(0, last - columns) * columns

    return rising(high + rows) - rising(high)


def repeated(counts: Integers) -> tuple[Integers, Integers]:
    """Index i counts[i] times over, and for each of those its number from 0."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(counts.cumsum() - counts, counts)


def united(shards: Integers, starts: Integers, stops: Integers, count: int) -> list[tuple[range, ...]]:
    """For each of so many shards, the union of ranges in it: sorted, disjoint, and not touching each other."""
    if not len(starts):
        return [()] * count
    order = np.lexsort((starts, shards))
    shards, starts, stops = shards[order], starts[order], stops[order]
    far = int(stops.max(initial=0)) + 1
    reach = np.maximum.accumulate(shards * far + stops)  # shards one after another
    begins = np.ones(len(starts), dtype=np.bool_)
    begins[1:] = (shards[1:] * far + starts[1:] > reach[:-1]) | (shards[1:] != shards[:-1])
    first = np.flatnonzero(begins)
    ends = reach[np.append(first[1:], len(starts)) - 1] - shards[first] * far
    found: list[list[range]] = [[] for _ in range(count)]
    for shard, start, stop in zip(shards[first].tolist(), starts[first].tolist(), ends.tolist(), strict=True):
        found[shard].append(range(start, stop))
    return [tuple(ranges) for ranges in found]
