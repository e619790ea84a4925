"""`Grid`: tiles, visible tokens and pairs of each block of a query shard and a key shard. No communication."""

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
from armillary.core.slices import widen

Result = TypeVar("Result")


class VisibleTokens(NamedTuple):
    """Tokens of two shards that take part in a visible pair, as local indices: sorted ranges that do not touch.

    Args:
        queries, keys: token ranges over all rows of the batch; empty if no pair is visible.
    """

    queries: tuple[range, ...] = ()
    keys: tuple[range, ...] = ()


class CachesDerived:
    """An immutable object that caches what is derived from it."""

    _derived: dict[Hashable, object]

    def cached(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Returns the result of `make`, computed once for each `key`."""
        derived = self._derived
        if key not in derived:
            derived[key] = make()
        return cast("Result", derived[key])

    def has(self, key: Hashable) -> bool:
        """Returns True if `cached` has computed the result for `key`."""
        return key in self._derived


class Grid(CachesDerived):
    """The blocks of a call: the shards of `layout` against the shards of `key_layout`, under a mask.

    Caches everything derived from these three (`cached`). A run with a new mask at every step, such as packed
    documents, has the grids of a few steps in memory.
    """

    def __init__(self, layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> None:
        self.layout, self.key_layout, self.mask = layout, key_layout, mask
        self._derived = {}

    @property
    def rows(self) -> range:
        """The batch rows that have masks of their own; a single row if all share one mask."""
        return range(self.mask.batch or 1)

    def visible(self, query: int, key: int) -> VisibleTokens:
        """Returns the tokens of query shard `query` and key shard `key` that see each other."""
        return self.cached(("visible", query), lambda: self._visible(query))[key]

    def pairs(self, query: int, key: int, batch: int) -> int:
        """Returns the number of visible pairs of a block, over all rows of a batch."""
        count = self.cached(("pairs", query), lambda: self._pairs(query))[key]
        return count * (1 if self.mask.per_row else batch)

    def tiles(self, query: int, key: int, row: int) -> tuple[Tile, ...]:
        """Returns the tiles of a block in one row of the batch."""

        def make() -> tuple[Tile, ...]:
            tiles = self._tile_arrays(query)[row]
            first, last = np.searchsorted(tiles[:, 0], (key, key + 1))
            return join_tiles(tiles[first:last])

        return self.cached(("tiles", query, key, row), make)

    # -- for a shard of queries and all shards of keys at once --------------------------------------------------------

    def _tile_arrays(self, query: int) -> list[TileArray]:
        """Returns, for each row of the batch, tiles before they are joined, in order of key shards."""

        def make() -> list[TileArray]:
            queries, keys = SpanTable.of([self.layout.spans(query)]), all_spans(self.key_layout)
            slices = self.cached("slices", lambda: self.mask.slices(self.layout.length, self.key_layout.length))
            return [tile_array(queries, keys, row) for row in slices]

        return self.cached(("arrays", query), make)

    def _visible(self, query: int) -> list[VisibleTokens]:
        # Tiles are trimmed: every row and column of a tile is in a visible pair.
        shard, q0, q1, k0, k1, *_ = np.concatenate(self._tile_arrays(query)).T
        shards = self.key_layout.shards
        return list(map(VisibleTokens, unite_ranges(shard, q0, q1, shards), unite_ranges(shard, k0, k1, shards)))

    def _pairs(self, query: int) -> list[int]:
        tiles = np.concatenate(self._tile_arrays(query))
        counts = pair_counts(tiles)
        pairs = widen(np.zeros(self.key_layout.shards, dtype=np.int64), self.layout.length, self.key_layout.length)
        np.add.at(pairs, tiles[:, 0], counts)
        return pairs.tolist()


GRIDS = BoundedCache[tuple[AttentionMask, SequenceLayout, SequenceLayout], Grid]()


def grid_of(layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> Grid:
    """Returns the grid of these layouts and this mask: one object for all layers, forward and backward."""
    key = (mask, layout, key_layout)
    return GRIDS.get(key) or GRIDS.add(key, Grid(layout, key_layout, mask), mask)
