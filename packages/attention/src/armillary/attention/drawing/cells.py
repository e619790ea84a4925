"""Visible pairs counted in a grid of cells, however long the sequence is. Pure; no N x N anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.attention.tiling.spans import SpanTable, pair_counts, tile_array
from armillary.core.slices import Integers, Slices

Shares2D = NDArray[np.float64]


def cell_edges(length: int, most: int) -> Integers:
    """Boundaries of at most so many cells of about equal size; one token each where there are no more tokens."""
    count = min(length, most)
    return np.arange(count + 1) * length // count


def pieces(spans: Iterable[range], edges: Integers) -> Iterator[tuple[int, range]]:
    """The spans cut at the edges of cells: (cell, piece)."""
    for span in spans:
        first, last = np.searchsorted(edges, (span[0], span[-1]), side="right") - 1
        for cell in range(int(first), int(last) + 1):
            start, stop = (-((span.start - int(edge)) // span.step) for edge in edges[cell : cell + 2])
            if piece := span[max(0, start) : max(0, stop)]:
                yield cell, piece


class KeyCells:
    """The keys of some shards, cell by cell: made once for all shards of queries.

    Args:
        shards: the spans of each.
    """

    def __init__(self, shards: Sequence[Sequence[range]], edges: Integers) -> None:
        self.edges, self.cells, self.shards = edges, len(edges) - 1, len(shards)
        spans: list[list[range]] = [[] for _ in range(self.shards * self.cells)]
        for shard, its in enumerate(shards):
            for cell, piece in pieces(its, edges):
                spans[shard * self.cells + cell].append(piece)
        self._table = SpanTable.of(map(tuple, spans))

    def seen_by(self, queries: Sequence[range], slices: Slices) -> Integers:
        """Pairs [shards, cells of queries, cells of keys] that queries in some spans see."""
        cut = sorted(pieces(queries, self.edges), key=lambda piece: piece[0])
        found = tile_array(SpanTable.of([tuple(piece for _, piece in cut)]), self._table, slices)
        starts = np.cumsum([0, *(len(piece) for _, piece in cut)])
        rows = np.array([cell for cell, _ in cut])[np.searchsorted(starts, found[:, 1], side="right") - 1]
        pairs = np.zeros((self.shards, self.cells, self.cells), dtype=np.int64)
        np.add.at(pairs, (found[:, 0] // self.cells, rows, found[:, 0] % self.cells), pair_counts(found))
        return pairs


def count_cells(slices: Slices, edges: Integers) -> Integers:
    """Visible pairs [cells of queries, cells of keys]."""
    every = [range(int(edges[-1]))]
    return KeyCells([every], edges).seen_by(every, slices)[0]


def held(spans: Iterable[range], edges: Integers) -> Integers:
    """How many positions of each cell lie in the spans."""
    found = np.zeros(len(edges) - 1, dtype=np.int64)
    for cell, piece in pieces(spans, edges):
        found[cell] += len(piece)
    return found


def areas_of(edges: Integers) -> Integers:
    """All pairs of each cell."""
    sizes = np.diff(edges)
    return sizes[:, None] * sizes[None, :]
