"""The tiles of a pair of shards under a mask, joined into few kernel calls. Pure: no process group, no tensors.

A tile is a *band* on a rectangle of local indices: query a (a row) sees key b (a column) iff low <= b - a <= high. A
full rectangle has no bounds; a causal square has high = 0. Two spans of equal step under a causal or window mask give
at most one tile. Adjacent tiles are joined if their union is a band with bounds of theirs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.spans import SpanTable, TileArray, tile_array
from armillary.core.parts import FAR, Integers, Spans


def tiles(queries: Spans, keys: Spans, mask: AttentionMask, row: int = 0) -> tuple[Tile, ...]:
    """Returns tiles that cover each visible (query, key) pair of two shards once, and no other pair.

    Args:
        queries: the spans of the query shard, in local order.
        keys: the spans of the key shard, in local order.
        row: row of the batch; it matters only if rows have their own masks or documents.
    """
    if not queries or not keys:  # such as an empty key/value cache
        return ()
    query_table, key_table = SpanTable.of([queries]), SpanTable.of([keys])
    length = int(max(query_table.stop.max(), key_table.stop.max()))
    return join_tiles(tile_array(query_table, key_table, mask.row(row).slices_up_to(length)))


def join_tiles(array: TileArray) -> tuple[Tile, ...]:
    """Joins adjacent tiles (`_joint_band`), first along keys, then along queries. Covers the same pairs."""
    tiles = _transpose(_join(_transpose(_join(array[:, 1:]))))  # without the shard column
    return tuple(_tiles_of(tiles[np.lexsort(tiles[:, 3::-1].T)]))  # sorted by q0, then q1, k0, k1


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
    """Returns True for each of the tiles [n, 6] that may be joined with a tile to its left or right.

    If no tile has a lower bound, as under a causal mask, two tiles can only be joined if they end at the same row
    (`_joint_band`); if no tile has an upper bound, only if they start at the same row. Tiles of adjacent documents do
    neither, so thousands of them are excluded here.
    """
    has_low, has_high = (tiles[:, 4] != -FAR).any(), (tiles[:, 5] != FAR).any()
    if has_low and has_high:  # a window: a union may have a bound that one of its tiles lacks
        return np.ones(len(tiles), dtype=np.bool_)
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
