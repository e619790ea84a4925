"""The tiles of a pair of shards under a mask: intersections of slices and spans, joined into few kernel calls.

`tile_array` intersects a mask's slices with the spans of both shards, and `join_tiles` joins adjacent tiles.

A slice of a mask is a band on positions: query i sees key j iff low <= j - i <= high. Its intersection with a span of
queries and a span of keys of the same step is at most one tile: a *band* on a rectangle of local indices, in which
query a (a row) sees key b (a column) iff low <= b - a <= high. A full rectangle has no bounds; a causal square has
high = 0. Adjacent tiles are joined if their union is a band with bounds of theirs.

Pure: no process group, no tensors. Masks of many documents have thousands of slices, so each function computes all
intersections at once, in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from armillary.attention.kernels.kernel import Tile
from armillary.core import SequenceLayout
from armillary.core.internal import FAR, Integers, Slices, Spans, widen

TileArray = NDArray[np.int64]
"""[n, 7]: key shard, q0, q1, k0, k1, low, high of n tiles, as in `Tile`; -FAR and FAR stand for no bound."""


# -- spans of shards ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SpanTable:
    """The spans of some shards, sorted by start. Each field is an array with one element per span.

    Args:
        shard: the shard of the span.
        local_start: local index of the first token of the span in its shard.
        start, stop, step, count: positions start, start + step, ..., stop - 1 of the span, and their number.
        reach: the largest stop of this and all earlier spans. Spans with steps may overlap, so stops need not rise.
    """

    shard: Integers
    local_start: Integers
    start: Integers
    stop: Integers
    step: Integers
    count: Integers
    reach: Integers

    @classmethod
    def of(cls, shards: Iterable[Spans]) -> SpanTable:
        """Returns the table of all spans of the given shards."""
        rows = list[tuple[int, ...]]()
        for shard, spans in enumerate(shards):
            local_start = 0
            for span in spans:
                rows.append((shard, local_start, span.start, span[-1] + 1, span.step, len(span)))
                local_start += len(span)
        table = np.array(sorted(rows, key=lambda row: row[2]), dtype=np.int64).reshape(-1, 6).T
        return cls(*table, reach=np.maximum.accumulate(table[3]))

    def overlapping(self, starts: Integers, stops: Integers) -> tuple[Integers, Integers]:
        """Returns all pairs (i, index of a span) such that the span may overlap positions starts[i] .. stops[i] - 1.

        Returns:
            The i and the index of each pair, as two arrays.
        """
        # For each i the candidates are adjacent in the table: from the first span before which no span reaches beyond
        # starts[i], up to the last span that starts before stops[i].
        first, last = np.searchsorted(self.reach, starts, side="right"), np.searchsorted(self.start, stops)
        index, number = repeat_indices(np.maximum(last - first, 0))
        return index, first[index] + number


@lru_cache(maxsize=16)
def all_spans(layout: SequenceLayout) -> SpanTable:
    """Returns the spans of all shards of a layout."""
    return SpanTable.of(layout.spans_by_shard)


@dataclass(frozen=True, eq=False)
class Runs:
    """Parts of spans. Each field is an array with one element per part.

    Args:
        local_start, position: local index and position of the first token.
        step: step of the positions.
        count: number of tokens.
    """

    local_start: Integers
    position: Integers
    step: Integers
    count: Integers

    @classmethod
    def within(cls, table: SpanTable, span: Integers, start: Integers, stop: Integers) -> Runs:
        """Returns, for each i, the part of span `span[i]` of the table with positions in start[i] .. stop[i] - 1."""
        step, first = table.step[span], table.start[span]
        # Indices in the span of the first token at or after `start`, and at or after `stop`: ceil((start - first) /
        # step), written as -((first - start) // step).
        low = np.maximum(0, -((first - start) // step))
        high = np.minimum(table.count[span], -((first - stop) // step))
        return cls(table.local_start[span] + low, first + low * step, step, high - low)

    def __getitem__(self, index: NDArray[np.bool_] | Integers) -> Runs:
        return Runs(self.local_start[index], self.position[index], self.step[index], self.count[index])

    def single_tokens(self, index: Integers, is_selected: NDArray[np.bool_]) -> Runs:
        """Returns the runs, with each selected run i replaced by its token number index[i]."""
        return Runs(
            self.local_start + np.where(is_selected, index, 0),
            self.position + np.where(is_selected, index * self.step, 0),
            self.step,
            np.where(is_selected, 1, self.count),
        )


def repeat_indices(counts: Integers) -> tuple[Integers, Integers]:
    """Returns each index i repeated counts[i] times, and the number of each copy: [2, 1] gives [0, 0, 1], [0, 1, 0]."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(counts.cumsum() - counts, counts)


# -- intersections -----------------------------------------------------------------------------------------------------


def tile_array(queries: SpanTable, keys: SpanTable, slices: Slices) -> TileArray:
    """Returns the trimmed tiles of one shard's queries and all keys, sorted by key shard, then by q0, then by k0.

    Args:
        queries: the spans of one shard.
        keys: the spans of all key shards.
        slices: the slices of the mask, [n, 6]: q0, q1, k0, k1, low, high.
    """
    # 1. Rows: the queries of each slice in each span of queries, and the range starts .. stops - 1 of keys that any of
    #    them sees. Query i of a band sees keys i + low .. i + high.
    index, span = queries.overlapping(slices[:, 0], slices[:, 1])
    q0, q1, k0, k1, low, high = slices[index].T
    rows = Runs.within(queries, span, q0, q1)
    last = rows.position + (rows.count - 1) * rows.step
    starts, stops = np.maximum(k0, rows.position + low), np.minimum(k1, last + high + 1)
    nonempty = (rows.count > 0) & (starts < stops)
    rows, low, high, starts, stops = rows[nonempty], low[nonempty], high[nonempty], starts[nonempty], stops[nonempty]

    # 2. Columns: the part of each span of keys in that range.
    index, span = keys.overlapping(starts, stops)
    columns, rows = Runs.within(keys, span, starts[index], stops[index]), rows[index]
    shard, low, high = keys.shard[span], low[index], high[index]
    nonempty = columns.count > 0
    rows, columns, shard, low, high = rows[nonempty], columns[nonempty], shard[nonempty], low[nonempty], high[nonempty]
    # 3. From bounds on positions to bounds on local indices.
    return _trim(*_equalize_steps(rows, columns, shard, low, high))


def _equalize_steps(
    rows: Runs, columns: Runs, shard: Integers, low: Integers, high: Integers
) -> tuple[Runs, Runs, Integers, Integers, Integers]:
    """Cuts the shorter of two runs with unequal steps into single tokens, because such runs form no band."""
    unequal = (rows.step != columns.step) & (rows.count > 1) & (columns.count > 1)
    if not unequal.any():
        return rows, columns, shard, low, high
    # Each pair of runs is repeated once per token of its shorter run; `index` is the number of the token. Many tiles of
    # one token are slow, but exact.
    pair, index = repeat_indices(np.where(unequal, np.minimum(rows.count, columns.count), 1))
    rows, columns, unequal = rows[pair], columns[pair], unequal[pair]
    cut_rows = rows.count <= columns.count
    rows, columns = rows.single_tokens(index, unequal & cut_rows), columns.single_tokens(index, unequal & ~cut_rows)
    return rows, columns, shard[pair], low[pair], high[pair]


def _trim(rows: Runs, columns: Runs, shard: Integers, low: Integers, high: Integers) -> TileArray:
    """Turns bounds on positions into bounds on local indices, and trims tiles as `Tile.trim` does."""
    # Token a of a row run has position i = rows.position + a * step, token b of a column run has position
    # j = columns.position + b * step. With distance = columns.position - rows.position, low <= j - i <= high becomes
    #     ceil((low - distance) / step) <= b - a <= floor((high - distance) / step).
    # `shift` then turns a and b, which count from the first token of the run, into local indices. FAR is halved so that
    # differences do not overflow.
    step = np.where(rows.count > 1, rows.step, columns.step)
    distance, shift = columns.position - rows.position, columns.local_start - rows.local_start
    low = np.where(low == -FAR, -FAR, shift - (distance - np.maximum(low, -FAR // 2)) // step)
    high = np.where(high == FAR, FAR, shift + (np.minimum(high, FAR // 2) - distance) // step)
    q0, q1 = rows.local_start, rows.local_start + rows.count
    k0, k1 = columns.local_start, columns.local_start + columns.count
    # Drop rows without a visible pair, then columns without one, then bounds that exclude no remaining pair.
    q0, q1 = np.maximum(q0, k0 - high), np.minimum(q1, k1 - low)
    k0, k1 = np.maximum(k0, q0 + low), np.minimum(k1, q1 + high)
    low, high = np.where(low <= k0 - (q1 - 1), -FAR, low), np.where(high >= (k1 - 1) - q0, FAR, high)
    nonempty = (q0 < q1) & (k0 < k1) & (low <= high)
    tiles = np.stack((shard, q0, q1, k0, k1, low, high), axis=1)[nonempty]
    return tiles[np.lexsort((tiles[:, 3], tiles[:, 1], tiles[:, 0]))]


# -- joins -------------------------------------------------------------------------------------------------------------


def join_tiles(array: TileArray) -> tuple[Tile, ...]:
    """Joins adjacent tiles (`_joint_band`), first along keys, then along queries. Covers the same pairs."""
    tiles = _transpose(_join(_transpose(_join(array[:, 1:]))))  # without the shard column
    return tuple(_tiles_of(tiles[np.lexsort(tiles[:, 3::-1].T)]))  # sorted by q0, then q1, k0, k1


def _join(tiles: Integers) -> Integers:
    """Joins each of the tiles [n, 6] with a tile that ends at the column where it starts, if `_joint_band` can."""
    is_candidate = _may_join(tiles)  # mostly few, which keeps the slow loop below short
    if not is_candidate.any():
        return tiles
    # Tiles that are joined as far as possible, by the column at which they end.
    by_end = dict[int, list[Tile]]()
    for tile in sorted(_tiles_of(tiles[is_candidate]), key=lambda tile: (tile.k0, tile.q0)):
        left_neighbours, union = by_end.get(tile.k0, []), None
        for neighbour in left_neighbours:
            union = _joint_band(neighbour, tile)
            if union is not None:
                left_neighbours.remove(neighbour)
                break
        union = union or tile
        by_end.setdefault(union.k1, []).append(union)
    joined_tiles = [tile for same_end in by_end.values() for tile in same_end]
    return np.concatenate((tiles[~is_candidate], _array_of(joined_tiles)))


def _may_join(tiles: Integers) -> NDArray[np.bool_]:
    """Returns True for each of the tiles [n, 6] that may be joined with a tile to its left or right."""
    has_low, has_high = (tiles[:, 4] != -FAR).any(), (tiles[:, 5] != FAR).any()
    if has_low and has_high:  # a window: a union may have a bound that one of its tiles lacks
        return np.ones(len(tiles), dtype=np.bool_)
    # Without lower bounds, as under a causal mask, only tiles that end at the same row can be joined (`_joint_band`);
    # without upper bounds, only tiles that start at the same row. That excludes thousands of adjacent documents.
    edge = 0 if has_low else 1  # index of q0, the row at which a tile starts, or of q1, at which it ends
    # A tile may be joined with one that starts at the column where it ends, and has the same edge. Each pair
    # (column, edge) is one integer; coordinates are replaced by their index in sorted order, so that it fits.
    order = np.unique(tiles[:, :4], return_inverse=True)[1].reshape(-1, 4)
    starts, stops = (order[:, 2:] + order[:, edge : edge + 1] * order.size).T
    return np.isin(starts, stops) | np.isin(stops, starts)


def _joint_band(left_tile: Tile, right_tile: Tile) -> Tile | None:
    """Returns the union of two tiles that meet at a column, if it is a band with bounds of theirs; else None."""
    if left_tile.k1 != right_tile.k0:
        return None
    # Fast path of most cases: if neither tile has a lower bound, the union has none, and both must end at the same row;
    # if neither has an upper bound, both must start at the same row.
    if left_tile.low is right_tile.low is None and left_tile.q1 != right_tile.q1:
        return None
    if left_tile.high is right_tile.high is None and left_tile.q0 != right_tile.q0:
        return None
    # A tile lacks a bound of the union if no corner of its own is beyond it. So the bounds of both tiles are tried:
    # the union must give back both tiles when it is cut at the column between them.
    rows, cut = (min(left_tile.q0, right_tile.q0), max(left_tile.q1, right_tile.q1)), right_tile.k0
    for low in dict.fromkeys((left_tile.low, right_tile.low)):
        for high in dict.fromkeys((left_tile.high, right_tile.high)):
            union = Tile(*rows, left_tile.k0, right_tile.k1, low, high)
            if union.columns(union.k0, cut) == left_tile and union.columns(cut, union.k1) == right_tile:
                return union
    return None


def _transpose(tiles: Integers) -> Integers:
    """Returns tiles [n, 6] with queries and keys exchanged: low <= b - a <= high is -high <= a - b <= -low."""
    return tiles[:, (2, 3, 0, 1, 5, 4)] * np.array((1, 1, 1, 1, -1, -1))


def _tiles_of(array: Integers) -> list[Tile]:
    """Returns tiles [n, 6] as objects."""
    bounds = [[None if abs(bound) == FAR else bound for bound in column] for column in array[:, 4:].T.tolist()]
    return list(map(Tile, *array[:, :4].T.tolist(), *bounds)) if len(array) else []


def _array_of(tiles: list[Tile]) -> Integers:
    """Returns tiles as an array [n, 6]."""
    rows = [
        (*tile[:4], -FAR if tile.low is None else tile.low, FAR if tile.high is None else tile.high) for tile in tiles
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


# -- counts and unions -------------------------------------------------------------------------------------------------


def pair_counts(tiles: TileArray) -> Integers:
    """Returns the number of visible pairs of each tile."""
    # Pairs with b - a <= high, minus those with b - a <= low - 1. Here a and b count from the tile's own corner.
    _, q0, q1, k0, k1, low, high = widen(tiles, *(int(tiles[:, i].max(initial=0)) for i in (2, 4))).T
    rows, columns, shift = q1 - q0, k1 - k0, k0 - q0
    low, high = np.maximum(low - shift, 1 - rows), np.minimum(high - shift, columns - 1)

    def triangle(last: Integers) -> Integers:
        """Returns the sum of min(n, columns) over n = 1 .. last."""
        full = np.clip(last, 0, columns)
        return full * (full + 1) // 2 + np.maximum(0, last - columns) * columns

    def up_to(limit: Integers) -> Integers:
        """Returns the number of pairs with b - a <= limit."""
        # Row a has min(a + limit + 1, columns) of them, or 0 if that is negative.
        return triangle(limit + rows) - triangle(limit)

    return up_to(high) - up_to(low - 1)


def unite_ranges(shards: Integers, starts: Integers, stops: Integers, count: int) -> list[tuple[range, ...]]:
    """Returns, for each of `count` shards, the union of its ranges: sorted ranges that neither overlap nor touch.

    Args:
        shards: the shard of each range.
        starts, stops: the ranges.
    """
    if not len(starts):
        return [()] * count
    order = np.lexsort((starts, shards))
    shards, starts, stops = shards[order], starts[order], stops[order]
    # A range starts a new union if it starts after all earlier stops of its shard. To compute the largest earlier stop
    # for all shards with one running maximum, ranges of shard s are shifted by s * offset, beyond those of shard s - 1.
    offset = int(stops.max(initial=0)) + 1
    reach = np.maximum.accumulate(shards * offset + stops)
    is_start = np.ones(len(starts), dtype=np.bool_)
    is_start[1:] = (shards[1:] * offset + starts[1:] > reach[:-1]) | (shards[1:] != shards[:-1])
    first = np.flatnonzero(is_start)
    ends = reach[np.append(first[1:], len(starts)) - 1] - shards[first] * offset
    ranges: list[list[range]] = [[] for _ in range(count)]
    for shard, start, stop in zip(shards[first].tolist(), starts[first].tolist(), ends.tolist(), strict=True):
        ranges[shard].append(range(start, stop))
    return [tuple(shard_ranges) for shard_ranges in ranges]
