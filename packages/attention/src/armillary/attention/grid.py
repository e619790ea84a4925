"""What the shards of queries see of the shards of keys, cell by cell. Pure; no process group, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from armillary.attention.mask import AttentionMask, Window
from armillary.attention.tiles import Placed, Tile, band, by_document, equal_steps
from armillary.core import SequenceLayout


class Hull(NamedTuple):
    """The fewest neighbouring queries and keys of two shards, as local indices, with every visible pair among them.

    Args:
        queries, keys: over all rows of the batch; two empty ranges if no pair is visible.
        pairs: how many are: in all rows together if they have documents of their own, else in each of them.
    """

    queries: range = range(0)
    keys: range = range(0)
    pairs: int = 0


class Grid:
    """The cells of a call: shards of `layout` against those of `key_layout`, under a mask. Looks at each cell once."""

    def __init__(self, layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> None:
        self.layout, self.key_layout, self.mask = layout, key_layout, mask
        self._known = dict[tuple[int, int], Hull]()

    def hull(self, query: int, key: int) -> Hull:
        """Of shard `query` of the queries and shard `key` of the keys."""
        found = self._known.get((query, key))
        if found is None:
            found = self._known[query, key] = _around(list(self._seen(query, key)))
        return found

    def pairs(self, query: int, key: int, batch: int) -> int:
        """Visible pairs of the cell in all rows of a batch."""
        return self.hull(query, key).pairs * (1 if self.mask.per_row else batch)

    def _seen(self, query: int, key: int) -> Iterator[Seen]:
        """What spans see of each other: (its queries' start and stop, its keys', pairs), local to the shards."""
        bounds = self.mask.bounds()
        for row in range(len(self.mask.documents or ()) if self.mask.per_row else 1):
            above, across = (_pieces(of, self.mask, row) for of in (self.layout, self.key_layout))
            for document in above[query].keys() & across[key].keys():
                for first in above[query][document]:
                    for second in across[key][document]:
                        for (q, queries), (k, keys) in equal_steps(first, second):
                            step = queries.step if len(queries) > 1 else keys.step
                            found = _corner(len(queries), len(keys), keys[0] - queries[0], step, bounds)
                            if found:
                                yield q + found[0], q + found[1], k + found[2], k + found[3], found[4]


Seen = tuple[int, int, int, int, int]


@lru_cache(maxsize=16)
def grid_of(layout: SequenceLayout, key_layout: SequenceLayout, mask: AttentionMask) -> Grid:
    """The grid, the same one for all calls that are alike: layers, forward and backward."""
    return Grid(layout, key_layout, mask)


@lru_cache(maxsize=64)
def _pieces(layout: SequenceLayout, mask: AttentionMask, row: int) -> tuple[dict[int, list[Placed]], ...]:
    """By shard and document."""
    return tuple(by_document(layout.spans(shard), mask.boundaries(row)) for shard in range(layout.shards))


# Shards differ in where their spans lie; how far spans lie from each other repeats.
@lru_cache(maxsize=16384)
def _corner(queries: int, keys: int, apart: int, step: int, bounds: Window) -> Seen | None:
    """What so many queries see of so many keys, the first of which is at so many positions after the first of them."""
    tile = band(Tile(0, queries, 0, keys), apart, step, bounds)
    return None if tile is None else (tile.q0, tile.q1, tile.k0, tile.k1, tile.area)


def _around(seen: list[Seen]) -> Hull:
    if not seen:
        return Hull()
    q0, q1, k0, k1, pairs = zip(*seen, strict=True)
    return Hull(range(min(q0), max(q1)), range(min(k0), max(k1)), sum(pairs))
