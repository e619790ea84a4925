"""From two lists of spans and a mask to the shortest list of kernel calls. Pure: no process group, no tensors.

Everything that masks and layouts can require of a pair of shards is a *band* on a rectangle of local indices: row a
sees column b iff low <= b - a <= high. Two spans of equal step under a causal or window mask give one band, and
neighbouring tiles that form one band are joined. A full rectangle has no bounds, a causal square has high = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.spans import SpanTable, TileArray, tile_array
from armillary.core.layout import Spans
from armillary.core.slices import FAR


def tiles(queries: Spans, keys: Spans, mask: AttentionMask, row: int = 0) -> tuple[Tile, ...]:
    """Returns kernel calls that cover each visible (query, key) pair of two shards once, and no other pair.

    Args:
        queries, keys: the spans of the two shards, in local order.
        row: row of the batch, where rows have masks of their own.
    """
    if not queries or not keys:  # such as an empty key/value cache
        return ()
    query_table, key_table = SpanTable.of([queries]), SpanTable.of([keys])
    length = int(max(query_table.stop.max(), key_table.stop.max()))
    return join_tiles(tile_array(query_table, key_table, mask.row(row).slices_up_to(length)))


def join_tiles(array: TileArray) -> tuple[Tile, ...]:
    """Returns the same pairs in fewer tiles: neighbours that form one band are joined, along keys and then queries."""
    rows: list[list[int]] = array.tolist()
    cells = [Tile(q0, q1, k0, k1, _bound(low), _bound(high)) for _, q0, q1, k0, k1, low, high in rows]
    wide = _join(cells, lambda tile: (tile.k0, tile.k1), _join_columns)
    return tuple(_join(wide, lambda tile: (tile.q0, tile.q1), _join_rows))


def _bound(value: int) -> int | None:
    return None if abs(value) == FAR else value


def _join(
    cells: list[Tile], edges: Callable[[Tile], tuple[int, int]], join: Callable[[Tile, Tile], Tile | None]
) -> list[Tile]:
    """Joins each tile to one that ends where it starts, if the two form a band."""
    by_end = dict[int, list[Tile]]()
    for tile in sorted(cells, key=lambda tile: (edges(tile)[0], tile.q0, tile.k0)):
        candidates = by_end.get(edges(tile)[0], [])
        previous, union = next(((old, both) for old in candidates if (both := join(old, tile))), (None, tile))
        if previous is not None:
            candidates.remove(previous)
        by_end.setdefault(edges(union)[1], []).append(union)
    return sorted((tile for same_end in by_end.values() for tile in same_end), key=lambda tile: tile[:4])


def _join_columns(a: Tile, b: Tile) -> Tile | None:
    """Returns `a` and `b`, to its right, as one tile; None if no single band has exactly their pairs."""
    if a.k1 != b.k0 or (a.low is b.low is None and a.q1 != b.q1) or (a.high is b.high is None and a.q0 != b.q0):
        return None  # the usual case: a side that is unbounded in both must reach the same edge
    for tile in _unions(a, b):
        if tile.columns(tile.k0, b.k0) == a and tile.columns(b.k0, tile.k1) == b:
            return tile
    return None


def _join_rows(a: Tile, b: Tile) -> Tile | None:
    """Returns `a` and `b`, below it, as one tile; None if no single band has exactly their pairs."""
    if a.q1 != b.q0 or (a.low is b.low is None and a.k0 != b.k0) or (a.high is b.high is None and a.k1 != b.k1):
        return None
    for tile in _unions(a, b):
        if tile.rows(tile.q0, b.q0) == a and tile.rows(b.q0, tile.q1) == b:
            return tile
    return None


def _unions(a: Tile, b: Tile) -> Iterator[Tile]:
    """Yields the rectangle around both, with each combination of their bounds."""
    for low in dict.fromkeys((a.low, b.low)):
        for high in dict.fromkeys((a.high, b.high)):
            yield Tile(min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1), low, high)
