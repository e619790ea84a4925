"""`Grid`: the tiles, visible tokens and numbers of pairs of each block, a query shard against a key shard. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar, cast

import numpy as np

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.bounded_cache import BoundedCache
from armillary.attention.tiling.spans import SpanTable, TileArray, all_spans, pair_counts, tile_array, unite_ranges
from armillary.attention.tiling.tiles import join_tiles
from armillary.core import SequenceLayout
from armillary.core.parts import widen

Result = TypeVar("Result")


class VisibleTokens(NamedTuple):
    """The tokens of a query shard and of a key shard that are in a visible pair, in any row of the batch.

    Args:
        queries, keys: sorted ranges of local indices, which do not touch; empty if no pair is visible.
    """

    queries: tuple[range, ...] = ()
    keys: tuple[range, ...] = ()


class CachesDerived:
    """Base class of immutable objects that cache the values computed from them."""

    _derived: dict[Hashable, object]

    def cached(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Returns the result of `make()`, which is called once for each `key`."""
        derived = self._derived
        if key not in derived:
            derived[key] = make()
        return cast("Result", derived[key])

    def has(self, key: Hashable) -> bool:
        """Returns True if `cached` has computed the result for `key`."""
        return key in self._derived


class Grid(CachesDerived):
    """The blocks of a call: each query shard of `layout` against each key shard of `key_layout`, under a mask.

    A grid caches the values derived from these three (`cached`), and `grid_of` caches the newest grids.
    """

    def __init__(self, layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> None:
        self.layout, self.key_layout, self.mask = layout, key_layout, mask
        self._derived = {}

    @property
    def rows(self) -> range:
        """Rows of the batch with different tiles: all if rows have their own masks or documents, otherwise row 0."""
        return range(self.mask.batch or 1)

    def visible(self, query: int, key: int) -> VisibleTokens:
        """Returns the tokens of query shard `query` and key shard `key` that are in a visible pair."""
        return self.cached(("visible", query), lambda: self._visible(query))[key]

    def pairs(self, query: int, key: int, batch: int) -> int:
        """Returns the number of visible pairs of a block, in all `batch` rows together."""
        count = self.cached(("pairs", query), lambda: self._pairs(query))[key]
        return count * (1 if self.mask.per_row else batch)

    def tiles(self, query: int, key: int, row: int) -> tuple[Tile, ...]:
        """Returns the tiles of a block in one row of the batch, joined."""

        def make() -> tuple[Tile, ...]:
            tiles = self._tile_arrays(query)[row]
            first, last = np.searchsorted(tiles[:, 0], (key, key + 1))
            return join_tiles(tiles[first:last])

        return self.cached(("tiles", query, key, row), make)

    # -- one query shard and all key shards at once -------------------------------------------------------------------

    def _tile_arrays(self, query: int) -> list[TileArray]:
        """Returns, for each of `rows`, the tiles of all key shards, in order of key shards and not joined yet."""

        def make() -> list[TileArray]:
            queries, keys = SpanTable.of([self.layout.spans(query)]), all_spans(self.key_layout)
            slices = self.cached("slices", lambda: self.mask.slices(self.layout.length, self.key_layout.length))
            return [tile_array(queries, keys, row) for row in slices]

        return self.cached(("arrays", query), make)

    def _visible(self, query: int) -> list[VisibleTokens]:
        """Returns the visible tokens of query shard `query` and each key shard."""
        # Tiles are trimmed: every row and column of a tile is in a visible pair.
        shard, q0, q1, k0, k1, *_ = np.concatenate(self._tile_arrays(query)).T
        shards = self.key_layout.shards
        return list(map(VisibleTokens, unite_ranges(shard, q0, q1, shards), unite_ranges(shard, k0, k1, shards)))

    def _pairs(self, query: int) -> list[int]:
        """Returns the number of visible pairs of query shard `query` and each key shard, over `rows`."""
        tiles = np.concatenate(self._tile_arrays(query))
        counts = pair_counts(tiles)
        pairs = widen(np.zeros(self.key_layout.shards, dtype=np.int64), self.layout.length, self.key_layout.length)
        np.add.at(pairs, tiles[:, 0], counts)
        return pairs.tolist()


GRIDS = BoundedCache[tuple[AttentionMask, SequenceLayout, SequenceLayout], Grid]()


def grid_of(layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> Grid:
    """Returns the grid of these layouts and this mask: the same object for all layers, and for forward and backward."""
    key = (mask, layout, key_layout)
    return GRIDS.get(key) or GRIDS.add(key, Grid(layout, key_layout, mask), mask)
