"""`Grid`: the tiles, visible tokens and numbers of pairs of each block, a query shard against a key shard. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple, TypeVar, cast

import numpy as np

from armillary.attention.kernels.kernel import Tile
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.attention_mask import BoundedCache
from armillary.attention.tiling.tiles import (
    SpanTable,
    TileArray,
    all_spans,
    join_tiles,
    pair_counts,
    tile_array,
    unite_ranges,
)
from armillary.core import SequenceLayout, TokenRanges
from armillary.core.internal import Spans, widen

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

        def make() -> list[VisibleTokens]:  # of the query shard and each key shard
            # Tiles are trimmed: every row and column of a tile is in a visible pair.
            shard, q0, q1, k0, k1, *_ = np.concatenate(self._tile_arrays(query)).T
            shards = self.key_layout.shards
            return list(map(VisibleTokens, unite_ranges(shard, q0, q1, shards), unite_ranges(shard, k0, k1, shards)))

        return self.cached(("visible", query), make)[key]

    def pairs(self, query: int, key: int, batch: int) -> int:
        """Returns the number of visible pairs of a block, in all `batch` rows together."""

        def make() -> list[int]:  # of the query shard and each key shard, over `rows`
            tiles = np.concatenate(self._tile_arrays(query))
            pairs = widen(np.zeros(self.key_layout.shards, dtype=np.int64), self.layout.length, self.key_layout.length)
            np.add.at(pairs, tiles[:, 0], pair_counts(tiles))
            return pairs.tolist()

        return self.cached(("pairs", query), make)[key] * (1 if self.mask.per_row else batch)

    def tiles(self, query: int, key: int, row: int) -> tuple[Tile, ...]:
        """Returns the tiles of a block in one row of the batch, joined."""

        def make() -> tuple[Tile, ...]:
            tiles = self._tile_arrays(query)[row]
            first, last = np.searchsorted(tiles[:, 0], (key, key + 1))
            return join_tiles(tiles[first:last])

        return self.cached(("tiles", query, key, row), make)

    def _tile_arrays(self, query: int) -> list[TileArray]:
        """Returns, for each of `rows`, the tiles of a query shard and all key shards, by key shard and not joined yet.

        All key shards at once, so that NumPy's overhead is paid once.
        """

        def make() -> list[TileArray]:
            queries, keys = SpanTable.of([self.layout.spans(query)]), all_spans(self.key_layout)
            slices = self.cached("slices", lambda: self.mask.slices(self.layout.length, self.key_layout.length))
            return [tile_array(queries, keys, row) for row in slices]

        return self.cached(("arrays", query), make)


GRIDS = BoundedCache[tuple[AttentionMask, SequenceLayout, SequenceLayout], Grid]()


def grid_of(layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> Grid:
    """Returns the grid of these layouts and this mask: the same object for all layers, and for forward and backward."""
    key = (mask, layout, key_layout)
    return GRIDS.get(key) or GRIDS.add(key, Grid(layout, key_layout, mask), mask)


# -- layouts of some positions -----------------------------------------------------------------------------------------


class PartialLayout(SequenceLayout):
    """A layout of only some positions of a sequence. Its shards may be empty.

    Positions stay those of the full sequence, so that masks, tiles and methods use it like any other layout.

    Args:
        spans: spans of each shard, as in `SequenceLayout`; they need not cover all positions.
        length: number of positions of the full sequence.
    """

    __slots__ = ()

    def __init__(self, spans: Iterable[Iterable[range]], length: int) -> None:
        super().__init__(spans)
        self.length = length

    def _check(self) -> None:
        """Accepts any positions: instances are only made from parts of checked layouts."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and isinstance(other, SequenceLayout) and self.length == other.length

    __hash__ = SequenceLayout.__hash__

    def coarsen(self, n: int) -> PartialLayout:
        groups = (self.spans_by_shard[i : i + n] for i in range(0, self.shards, n))
        return PartialLayout(map(chain.from_iterable, groups), self.length)


def spans_at(spans: Spans, tokens: TokenRanges) -> Iterator[range]:
    """Yields the positions of some tokens of a shard.

    Args:
        spans: spans of the shard.
        tokens: indices of tokens in the shard.
    """
    start = 0
    for span in spans:
        for run in tokens.runs:
            yield span[max(0, run.start - start) : max(0, run.stop - start)]
        start += len(span)
