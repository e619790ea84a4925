"""From two lists of spans and a mask to the shortest list of kernel calls. Pure; no process group, no tensors.

Everything that masks and layouts can ask of a pair of shards is a *band* on a rectangle of local indices: row a sees
column b iff low <= b - a <= high. Two spans of equal step under a causal or window mask give one band; neighbouring
bands that are one band together are joined. A full rectangle has no bounds, a causal square has high = 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from armillary.attention.mask import AttentionMask, Window
from armillary.core.layout import Spans, cut_at

Placed = tuple[int, range]
"""The local index of the first token of a run, and its positions."""
Pieces = dict[int, list[Placed]]
"""What a shard holds of each document that it has any of."""


class Tile(NamedTuple):
    """Rows q0..q1 and columns k0..k1 (ends excluded) of two shards; row a sees column b iff low <= b - a <= high.

    Indices are local to the shards; a bound of None does not bind. `trimmed` tiles are canonical: every row and column
    sees something, and a bound that binds nowhere is None.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None = None
    high: int | None = None

    @property
    def offsets(self) -> Window:
        """(low, high) counted from the tile's own corner instead of the shards'."""
        shift = self.k0 - self.q0
        return None if self.low is None else self.low - shift, None if self.high is None else self.high - shift

    @property
    def area(self) -> int:
        """Visible pairs: the tile's share of the work."""
        rows, columns, (low, high) = self.q1 - self.q0, self.k1 - self.k0, self.offsets
        last = rows * columns if high is None else _up_to(high, rows, columns)
        return last if low is None else max(0, last - _up_to(low - 1, rows, columns))

    def rows(self, start: int, stop: int) -> Tile | None:
        """The part of the tile in these rows, trimmed."""
        return self._replace(q0=max(self.q0, start), q1=min(self.q1, stop)).trimmed()

    def columns(self, start: int, stop: int) -> Tile | None:
        """The part of the tile in these columns, trimmed."""
        return self._replace(k0=max(self.k0, start), k1=min(self.k1, stop)).trimmed()

    def trimmed(self) -> Tile | None:
        """The same pairs in canonical form; None if there are none."""
        return _trimmed(*self)


def _trimmed(q0: int, q1: int, k0: int, k1: int, low: int | None, high: int | None) -> Tile | None:
    if low is not None and high is not None and low > high:
        return None
    q0, q1 = q0 if high is None else max(q0, k0 - high), q1 if low is None else min(q1, k1 - low)
    k0, k1 = k0 if low is None else max(k0, q0 + low), k1 if high is None else min(k1, q1 + high)
    if q0 >= q1 or k0 >= k1:
        return None
    low = None if low is None or low <= k0 - (q1 - 1) else low
    high = None if high is None or high >= (k1 - 1) - q0 else high
    return Tile(q0, q1, k0, k1, low, high)


def tiles(queries: Spans, keys: Spans, mask: AttentionMask, row: int = 0) -> tuple[Tile, ...]:
    """Kernel calls that cover each visible (query, key) pair of two shards once, and no other pair.

    Args:
        queries, keys: the spans of the two shards, in local order.
        row: the row of the batch, where rows have documents of their own.
    """
    ends = mask.boundaries(row)
    return tiles_of(by_document(queries, ends), by_document(keys, ends), mask.bounds())


def tiles_of(queries: Pieces, keys: Pieces, bounds: Window) -> tuple[Tile, ...]:
    """`tiles` of shards that are cut at document boundaries already."""
    done: list[Tile] = []
    above: list[Tile] = []
    shared = queries.keys() & keys.keys()  # few where shards are many: most documents lie in one shard
    ordered = sorted((at, run, number) for number in shared for at, run in queries[number])
    for at, run, document in ordered:
        here: list[Tile] = []
        for band in (tile for key in keys[document] for tile in bands((at, run), key, bounds)):
            if here and (both := _joined_columns(here[-1], band)):
                here[-1] = both
            else:
                here.append(band)
        above = list(_stack(above, here, done))
    return (*done, *above)


def _stack(above: list[Tile], here: list[Tile], done: list[Tile]) -> Iterator[Tile]:
    """`here`, each joined to the tile of `above` that it continues; tiles of `above` that none continues are done."""
    left = list(above)
    for tile in here:
        found = next(((old, both) for old in left if (both := _joined_rows(old, tile))), None)
        if found:
            left.remove(found[0])
        yield found[1] if found else tile
    done.extend(left)


def by_document(spans: Spans, ends: tuple[int, ...] | None) -> Pieces:
    """A shard, cut at document boundaries; one document, number 0, where there are none."""
    found: Pieces = {}
    at = 0
    for span in spans:
        for document, piece in [(0, span)] if ends is None else cut_at(span, ends):
            found.setdefault(document, []).append((at, piece))
            at += len(piece)
    return found


def bands(first: Placed, second: Placed, bounds: Window) -> Iterator[Tile]:
    """What a run of queries sees of a run of keys of the same document: a trimmed tile, or none.

    Query a is at position queries[0] + a * step, key b at keys[0] + b * step: bounds on positions are bounds on b - a.

    Args:
        bounds: of a key's position less a query's.
    """
    for (q, queries), (k, keys) in _equal_steps(first, second):
        step = queries.step if len(queries) > 1 else keys.step
        apart, shift = keys.start - queries.start, k - q
        low = None if bounds[0] is None else -((apart - bounds[0]) // step) + shift
        high = None if bounds[1] is None else (bounds[1] - apart) // step + shift
        if tile := _trimmed(q, q + len(queries), k, k + len(keys), low, high):
            yield tile


def _equal_steps(query: Placed, key: Placed) -> Iterator[tuple[Placed, Placed]]:
    """Spans of unequal steps have no band: the shorter one goes token by token. Right, if slow."""
    (q_at, q), (k_at, k) = query, key
    if q.step == k.step or len(q) == 1 or len(k) == 1:
        yield query, key
    elif len(q) <= len(k):
        yield from (((q_at + i, q[i : i + 1]), key) for i in range(len(q)))
    else:
        yield from ((query, (k_at + i, k[i : i + 1])) for i in range(len(k)))


def _joined_columns(a: Tile, b: Tile) -> Tile | None:
    """`a` and `b`, to its right, as one tile, or None where no single band has exactly their pairs."""
    if a.k1 != b.k0 or (a.low is b.low is None and a.q1 != b.q1) or (a.high is b.high is None and a.q0 != b.q0):
        return None  # what most neighbours are: an unbounded side reaches the edge of both
    for tile in _unions(a, b):
        if tile.columns(tile.k0, b.k0) == a and tile.columns(b.k0, tile.k1) == b:
            return tile
    return None


def _joined_rows(a: Tile, b: Tile) -> Tile | None:
    """`a` and `b`, below it, as one tile, or None where no single band has exactly their pairs."""
    if a.q1 != b.q0 or (a.low is b.low is None and a.k0 != b.k0) or (a.high is b.high is None and a.k1 != b.k1):
        return None
    for tile in _unions(a, b):
        if tile.rows(tile.q0, b.q0) == a and tile.rows(b.q0, tile.q1) == b:
            return tile
    return None


def _up_to(high: int, rows: int, columns: int) -> int:
    """Pairs of a rectangle with b - a <= high: row after row one more, from none to all columns."""

    def rising(last: int) -> int:
        """The sum of x from 0 to `last`, none of them counted above `columns`."""
        whole = max(0, min(last, columns))
        return whole * (whole + 1) // 2 + max(0, last - columns) * columns

    return rising(high + rows) - rising(high)


def _unions(a: Tile, b: Tile) -> Iterator[Tile]:
    """The rectangle around both, under each pair of bounds that one of them has."""
    for low in dict.fromkeys((a.low, b.low)):
        for high in dict.fromkeys((a.high, b.high)):
            yield Tile(min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1), low, high)
