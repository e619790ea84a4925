"""What the shards of queries see of the shards of keys, block by block. Pure; no process group, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar, cast

import numpy as np

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.bounded_cache import BoundedCache
from armillary.attention.tiling.spans import SpanTable, TileArray, all_spans, areas, tile_array, united
from armillary.attention.tiling.tiles import joined
from armillary.core import SequenceLayout

Known = TypeVar("Known")


class Seen(NamedTuple):
    """Tokens of two shards that see each other, as local indices: sorted ranges that do not touch.

    Args:
        queries, keys: over all rows of the batch; none if no pair is visible.
    """

    queries: tuple[range, ...] = ()
    keys: tuple[range, ...] = ()


class Grid:
    """The blocks of a call: shards of `layout` against those of `key_layout`, under a mask.

    Whatever follows from the three is found once and kept here, and goes when the grid does: a run whose masks are new
    at every step (documents) holds the grids of a few steps and nothing else.
    """

    def __init__(self, layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> None:
        self.layout, self.key_layout, self.mask = layout, key_layout, mask
        self._known = dict[Hashable, object]()

    def once(self, key: Hashable, find: Callable[[], Known]) -> Known:
        """What `find` returns, found once for each `key`."""
        if key not in self._known:
            self._known[key] = find()
        return cast("Known", self._known[key])

    @property
    def rows(self) -> range:
        """Rows of the batch with masks of their own; one for all, where they have none."""
        return range(self.mask.batch or 1)

    def seen(self, query: int, key: int) -> Seen:
        """What shard `query` of the queries and shard `key` of the keys see of each other."""
        return self.once(("seen", query), lambda: self._seen(query))[key]

    def pairs(self, query: int, key: int, batch: int) -> int:
        """Visible pairs of the block in all rows of a batch."""
        found = self.once(("pairs", query), lambda: self._pairs(query))[key]
        return found * (1 if self.mask.per_row else batch)

    def tiles(self, query: int, key: int, row: int) -> tuple[Tile, ...]:
        """Kernel calls of the block in one row of the batch."""
        return self.once(("tiles", query, key, row), lambda: joined(self._block(query, key, row)))

    # -- found for a shard of queries and all shards of keys at once --------------------------------------------------

    def _block(self, query: int, key: int, row: int) -> TileArray:
        found = self._tiles(query)[row]
        first, last = np.searchsorted(found[:, 0], (key, key + 1))
        return found[first:last]

    def _tiles(self, query: int) -> list[TileArray]:
        """For each row of the batch, tiles before they are joined, in order of the keys' shards."""
        return self.once(("array", query), lambda: self._find(query))

    def _find(self, query: int) -> list[TileArray]:
        queries, keys = SpanTable.of([self.layout.spans(query)]), all_spans(self.key_layout)
        slices = self.once("slices", lambda: self.mask.slices(self.layout.length, self.key_layout.length))
        return [tile_array(queries, keys, row) for row in slices]

    def _seen(self, query: int) -> list[Seen]:
        shard, q0, q1, k0, k1, *_ = np.concatenate(self._tiles(query)).T
        shards = self.key_layout.shards
        return list(map(Seen, united(shard, q0, q1, shards), united(shard, k0, k1, shards)))

    def _pairs(self, query: int) -> list[int]:
        found = np.concatenate(self._tiles(query))
        pairs = np.zeros(self.key_layout.shards, dtype=np.int64)
        np.add.at(pairs, found[:, 0], areas(found))
        return pairs.tolist()


GRIDS = BoundedCache[tuple[AttentionMask, SequenceLayout, SequenceLayout], Grid]()


def grid_of(layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> Grid:
    """The grid, the same one for all calls that are alike: layers, forward and backward."""
    key = (mask, layout, key_layout)
    return GRIDS.get(key) or GRIDS.add(key, Grid(layout, key_layout, mask), mask)
