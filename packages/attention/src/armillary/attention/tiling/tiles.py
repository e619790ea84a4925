"""From two lists of spans and a mask to the shortest list of kernel calls. Pure; no process group, no tensors.

Everything that masks and layouts can ask of a pair of shards is a *band* on a rectangle of local indices: row a sees
column b iff low <= b - a <= high. Two spans of equal step under a causal or window mask give one band; neighbouring
bands that are one band together are joined. A full rectangle has no bounds, a causal square has high = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.spans import SpanTable, TileArray, tile_array
from armillary.core.layout import Spans
from armillary.core.slices import FAR


def tiles(queries: Spans, keys: Spans, mask: AttentionMask, row: int = 0) -> tuple[Tile, ...]:
    """Kernel calls that cover each visible (query, key) pair of two shards once, and no other pair.

    Args:
        queries, keys: the spans of the two shards, in local order.
        row: the row of the batch, where rows have masks of their own.
    """
    if not queries or not keys:  # such as a cache in which this rank holds nothing yet
        return ()
    table, others = SpanTable.of([queries]), SpanTable.of([keys])
    last = int(max(table.stop.max(), others.stop.max()))
    return joined(tile_array(table, others, mask.row(row).slices_up_to(last)))


def joined(found: TileArray) -> tuple[Tile, ...]:
    """The same pairs in fewer tiles: neighbours that are one band together, first along keys, then along queries."""
    rows: list[list[int]] = found.tolist()
    single = [Tile(q0, q1, k0, k1, _bound(low), _bound(high)) for _, q0, q1, k0, k1, low, high in rows]
    wide = _joined(single, lambda tile: (tile.k0, tile.k1), _joined_columns)
    return tuple(_joined(wide, lambda tile: (tile.q0, tile.q1), _joined_rows))


def _joined(
    some: list[Tile], edges: Callable[[Tile], tuple[int, int]], join: Callable[[Tile, Tile], Tile | None]
) -> list[Tile]:
    """Each tile joined to one that ends where it starts."""
    ending = dict[int, list[Tile]]()
    for tile in sorted(some, key=lambda tile: (edges(tile)[0], tile.q0, tile.k0)):
        candidates = ending.get(edges(tile)[0], [])
        old, both = next(((old, both) for old in candidates if (both := join(old, tile))), (None, tile))
        if old is not None:
            candidates.remove(old)
        ending.setdefault(edges(both)[1], []).append(both)
    return sorted((tile for tiles in ending.values() for tile in tiles), key=lambda tile: tile[:4])


def _bound(value: int) -> int | None:
    return None if abs(value) == FAR else value


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


def _unions(a: Tile, b: Tile) -> Iterator[Tile]:
    """The rectangle around both, under each pair of bounds that one of them has."""
    for low in dict.fromkeys((a.low, b.low)):
        for high in dict.fromkeys((a.high, b.high)):
            yield Tile(min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1), low, high)
