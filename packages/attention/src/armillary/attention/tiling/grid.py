"""What the shards of queries see of the shards of keys, block by block. Pure; no process group, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast

from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.tiles import Pieces, Tile, bands, by_document, tiles_of
from armillary.core import SequenceLayout

Known = TypeVar("Known")


class Visible(NamedTuple):
    """The fewest neighbouring queries and keys of two shards, as local indices, with every visible pair among them.

    Args:
        queries, keys: over all rows of the batch; two empty ranges if no pair is visible.
    """

    queries: range = range(0)
    keys: range = range(0)


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
        """Rows of the batch with documents of their own; one for all, where they have none."""
        return range(len(self.mask.documents or ()) if self.mask.per_row else 1)

    def hull(self, query: int, key: int) -> Visible:
        """Of shard `query` of the queries and shard `key` of the keys."""
        return self.once(("hull", query, key), lambda: _around(self._seen(query, key)))

    def pairs(self, query: int, key: int, batch: int) -> int:
        """Visible pairs of the block in all rows of a batch."""
        found = self.once(("pairs", query, key), lambda: sum(tile.area for tile in self._seen(query, key)))
        return found * (1 if self.mask.per_row else batch)

    def tiles(self, query: int, key: int, row: int) -> tuple[Tile, ...]:
        """Kernel calls of the block in one row of the batch."""
        held = self.queries(query, row), self.keys(key, row)
        return self.once(("tiles", query, key, row), lambda: tiles_of(*held, self.mask.bounds()))

    def queries(self, shard: int, row: int) -> Pieces:
        """A shard of the queries by document."""
        return self._by_document(self.layout, shard, row)

    def keys(self, shard: int, row: int) -> Pieces:
        """A shard of the keys by document."""
        return self._by_document(self.key_layout, shard, row)

    def _by_document(self, layout: SequenceLayout, shard: int, row: int) -> Pieces:
        key = (layout is self.layout or layout == self.layout, shard, row)
        return self.once(key, lambda: by_document(layout.spans(shard), self.mask.boundaries(row)))

    def _seen(self, query: int, key: int) -> Iterator[Tile]:
        """What the pieces of two shards see of each other, in any order and not joined."""
        bounds = self.mask.bounds()
        for row in self.rows:
            held, others = self.queries(query, row), self.keys(key, row)
            for document in held.keys() & others.keys():
                for first in held[document]:
                    for second in others[document]:
                        yield from bands(first, second, bounds)


@lru_cache(maxsize=8)
def grid_of(layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> Grid:
    """The grid, the same one for all calls that are alike: layers, forward and backward."""
    return Grid(layout, key_layout, mask)


def _around(seen: Iterable[Tile]) -> Visible:
    sides = [tile[:4] for tile in seen]
    if not sides:
        return Visible()
    q0, q1, k0, k1 = zip(*sides, strict=True)
    return Visible(range(min(q0), max(q1)), range(min(k0), max(k1)))
