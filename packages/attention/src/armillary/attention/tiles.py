"""From two lists of spans and a mask to the shortest list of kernel calls. Pure; no process group, no tensors.

Everything that masks and layouts can ask of a pair of shards is a *band* on a rectangle of local indices: row a sees
column b iff low <= b - a <= high. Two spans of equal step under a causal or window mask give one band; neighbouring
bands that are one band together are joined. A full rectangle has no bounds, a causal square has high = 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from armillary.attention.mask import AttentionMask, Window
from armillary.core import Spans, cut_at

Placed = tuple[int, range]
"""The local index of the first token of a run, and its positions."""


@dataclass(frozen=True)
class Tile:
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
        return replace(self, q0=max(self.q0, start), q1=min(self.q1, stop)).trimmed()

    def columns(self, start: int, stop: int) -> Tile | None:
        """The part of the tile in these columns, trimmed."""
        return replace(self, k0=max(self.k0, start), k1=min(self.k1, stop)).trimmed()

    def trimmed(self) -> Tile | None:
        """The same pairs in canonical form; None if there are none."""
        q0, q1, k0, k1, low, high = self.q0, self.q1, self.k0, self.k1, self.low, self.high
        if low is not None and high is not None and low > high:
            return None
        q0, q1 = q0 if high is None else max(q0, k0 - high), q1 if low is None else min(q1, k1 - low)
        k0, k1 = k0 if low is None else max(k0, q0 + low), k1 if high is None else min(k1, q1 + high)
        if q0 >= q1 or k0 >= k1:
            return None
        low = None if low is None or low <= k0 - (q1 - 1) else low
        high = None if high is None or high >= (k1 - 1) - q0 else high
        return Tile(q0, q1, k0, k1, low, high)


@lru_cache(maxsize=4096)
def tiles(queries: Spans, keys: Spans, mask: AttentionMask, row: int = 0) -> tuple[Tile, ...]:
    """Kernel calls that cover each visible (query, key) pair of two shards once, and no other pair.

    Args:
        queries, keys: the spans of the two shards, in local order.
        row: the row of the batch, where rows have documents of their own.
    """
    done: list[Tile] = []
    above: list[Tile] = []
    inside = by_document(keys, mask.boundaries(row))
    for document, at, query in _pieces(queries, mask.boundaries(row)):
        here: list[Tile] = []
        for band in _bands(at, query, inside.get(document, ()), mask.bounds()):
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


def _pieces(spans: Spans, ends: tuple[int, ...] | None) -> list[tuple[int, int, range]]:
    """(document, local index of its first token, positions) of each piece of the spans that lies in one document."""
    pieces: list[tuple[int, int, range]] = []
    at = 0
    for span in spans:
        for document, piece in [(0, span)] if ends is None else cut_at(span, ends):
            pieces.append((document, at, piece))
            at += len(piece)
    return pieces


@lru_cache(maxsize=4096)
def by_document(spans: Spans, ends: tuple[int, ...] | None) -> dict[int, list[Placed]]:
    """The pieces of each document that a shard has any of."""
    found: dict[int, list[Placed]] = {}
    for document, at, piece in _pieces(spans, ends):
        found.setdefault(document, []).append((at, piece))
    return found


def _bands(q_at: int, query: range, keys: Iterable[Placed], bounds: Window) -> Iterator[Tile]:
    """The visible part of one query span against key spans, a trimmed tile for each span that is seen."""
    for k_at, key in keys:
        for (a, q), (b, k) in equal_steps((q_at, query), (k_at, key)):
            if tile := _band(a, q, b, k, bounds):
                yield tile


def _band(q_at: int, query: range, k_at: int, key: range, bounds: Window) -> Tile | None:
    step = query.step if len(query) > 1 else key.step
    return band(Tile(q_at, q_at + len(query), k_at, k_at + len(key)), key[0] - query[0], step, bounds)


def band(tile: Tile, apart: int, step: int, bounds: Window) -> Tile | None:
    """What is visible of a tile whose rows and columns are positions `step` apart, trimmed.

    Row a is position query[0] + a * step, column b is key[0] + b * step: bounds on positions are bounds on b - a.

    Args:
        apart: the first key's position less the first query's.
        bounds: of a key's position less a query's.
    """
    low, high = bounds
    shift = tile.k0 - tile.q0
    low = None if low is None else -((apart - low) // step) + shift
    high = None if high is None else (high - apart) // step + shift
    return Tile(tile.q0, tile.q1, tile.k0, tile.k1, low, high).trimmed()


def equal_steps(query: Placed, key: Placed) -> Iterator[tuple[Placed, Placed]]:
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
    for tile in _unions(a, b):
        if tile.columns(tile.k0, b.k0) == a and tile.columns(b.k0, tile.k1) == b:
            return tile
    return None


def _joined_rows(a: Tile, b: Tile) -> Tile | None:
    """`a` and `b`, below it, as one tile, or None where no single band has exactly their pairs."""
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
    for low in (a.low, b.low):
        for high in (a.high, b.high):
            yield Tile(min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1), low, high)
