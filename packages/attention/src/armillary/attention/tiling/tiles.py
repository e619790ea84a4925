"""The tiles of a pair of shards under a mask: as few kernel calls as possible. Pure: no process group, no tensors.

A tile is a *band* on a rectangle of local indices: row a sees column b iff low <= b - a <= high. Two spans of equal
step under a causal or window mask give one band; adjacent tiles that form one band are joined. A full rectangle has no
bounds, a causal square has high = 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.spans import SpanTable, TileArray, tile_array
from armillary.core.slices import FAR, Integers
from armillary.core.spans import Spans


def tiles(queries: Spans, keys: Spans, mask: AttentionMask, row: int = 0) -> tuple[Tile, ...]:
    """Returns tiles that cover each visible (query, key) pair of two shards once, and no other pair.

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
    """Joins adjacent tiles that form one band, along keys and then along queries. Covers the same pairs."""
    rows = _transpose(_join(_transpose(_join(array[:, 1:]))))
    return tuple(_tiles_of(rows[np.lexsort(rows[:, 3::-1].T)]))


def _transpose(rows: Integers) -> Integers:
    """Returns tiles [n, 6] with queries and keys exchanged: low <= b - a <= high is -high <= a - b <= -low."""
    return rows[:, (2, 3, 0, 1, 5, 4)] * np.array((1, 1, 1, 1, -1, -1))


def _tiles_of(rows: Integers) -> list[Tile]:
    bounds = [[None if abs(bound) == FAR else bound for bound in column] for column in rows[:, 4:].T.tolist()]
    return list(map(Tile, *rows[:, :4].T.tolist(), *bounds)) if len(rows) else []


def _rows_of(tiles: list[Tile]) -> Integers:
    rows = [
        (*tile[:4], -FAR if tile.low is None else tile.low, FAR if tile.high is None else tile.high) for tile in tiles
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def _join(rows: Integers) -> Integers:
    """Joins each tile [n, 6] with the one to its left, if their union is one band."""
    is_candidate = _may_join(rows)  # few tiles are, so that the slow loop below is short
    if not is_candidate.any():
        return rows
    by_end = dict[int, list[Tile]]()  # joined tiles by their last column: a tile's left neighbours end where it starts
    for tile in sorted(_tiles_of(rows[is_candidate]), key=lambda tile: (tile.k0, tile.q0)):
        candidates = by_end.get(tile.k0, [])
        previous, union = next(((old, both) for old in candidates if (both := _joint_band(old, tile))), (None, tile))
        if previous is not None:
            candidates.remove(previous)
        by_end.setdefault(union.k1, []).append(union)
    joined_tiles = [tile for same_end in by_end.values() for tile in same_end]
    return np.concatenate((rows[~is_candidate], _rows_of(joined_tiles)))


def _may_join(rows: Integers) -> NDArray[np.bool_]:
    """Returns True for each of the tiles [n, 6] that another one may be joined to, on its left or right.

    If no tile is bounded from below, as under a causal mask, two tiles can only be joined if they have the same last
    row (`_joint_band`); without bounds from above, the same first row. Adjacent documents do not, so that thousands of
    them are excluded here.
    """
    lower, upper = (rows[:, 4] != -FAR).any(), (rows[:, 5] != FAR).any()
    if lower and upper:  # a window: a union may have bounds that its tiles lack, so no pair can be excluded
        return np.ones(len(rows), dtype=np.bool_)
    edge = 0 if lower else 1  # column of the first row, or of the last
    # Coordinates are replaced by their index in sorted order, so that a pair (column, row edge) fits into one integer.
    rank = np.unique(rows[:, :4], return_inverse=True)[1].reshape(-1, 4)
    starts, stops = (rank[:, 2:] + rank[:, edge : edge + 1] * rank.size).T
    return np.isin(starts, stops) | np.isin(stops, starts)


def _joint_band(a: Tile, b: Tile) -> Tile | None:
    """Returns the union of tile `a` and tile `b` to its right; None if it is not one band."""
    if a.k1 != b.k0 or (a.low is b.low is None and a.q1 != b.q1) or (a.high is b.high is None and a.q0 != b.q0):
        return None  # most cases: if a side is unbounded in both tiles, they must end at the same row there
    for low in dict.fromkeys((a.low, b.low)):
        for high in dict.fromkeys((a.high, b.high)):
            tile = Tile(min(a.q0, b.q0), max(a.q1, b.q1), a.k0, b.k1, low, high)
            if tile.columns(tile.k0, b.k0) == a and tile.columns(b.k0, tile.k1) == b:
                return tile
    return None
