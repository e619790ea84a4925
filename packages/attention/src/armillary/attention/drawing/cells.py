"""Counts of visible (query, key) pairs in a grid of cells. Builds no N x N array, so N may be large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from armillary.attention.tiling.spans import SpanTable, pair_counts, tile_array
from armillary.core.slices import Integers, Slices, widen


def cell_edges(length: int, limit: int) -> Integers:
    """Returns the boundaries [cells + 1] of at most `limit` cells of nearly equal size, each of one token or more."""
    count = min(length, limit)
    return np.arange(count + 1) * length // count


def cut_at_edges(spans: Iterable[range], edges: Integers) -> Iterator[tuple[int, range]]:
    """Cuts spans at the edges of cells. Yields (cell, piece): the index of a cell and the positions of a span in it."""
    for span in spans:
        first, last = np.searchsorted(edges, (span[0], span[-1]), side="right") - 1
        for cell in range(int(first), int(last) + 1):
            # Indices into the span: its first positions at or after the two edges of the cell (ceiling division).
            start, stop = (-((span.start - int(edge)) // span.step) for edge in edges[cell : cell + 2])
            if piece := span[max(0, start) : max(0, stop)]:
                yield cell, piece


class KeyCells:
    """The keys of all shards, cut into cells. Built once, and used for every query shard.

    Args:
        shards: the spans of each key shard.
        edges: the boundaries of the cells, from `cell_edges`.
    """

    def __init__(self, shards: Sequence[Sequence[range]], edges: Integers) -> None:
        self.edges, self.cells, self.shards = edges, len(edges) - 1, len(shards)
        spans: list[list[range]] = [[] for _ in range(self.shards * self.cells)]
        for shard, shard_spans in enumerate(shards):
            for cell, piece in cut_at_edges(shard_spans, edges):
                spans[shard * self.cells + cell].append(piece)
        self._table = SpanTable.of(map(tuple, spans))

    def pairs(self, queries: Sequence[range], slices: Slices) -> Integers:
        """Returns the numbers of visible pairs [key shards, query cells, key cells].

        Args:
            queries: spans of query positions.
        """
        pieces = sorted(cut_at_edges(queries, self.edges), key=lambda piece: piece[0])
        # All pieces of queries are one shard of the query table, so a tile's first query index (column 1) tells the
        # piece, and so the query cell. Each cell of a key shard is a shard of the key table (column 0).
        tiles = tile_array(SpanTable.of([tuple(piece for _, piece in pieces)]), self._table, slices)
        starts = np.cumsum([0, *(len(piece) for _, piece in pieces)])
        query_cells = np.array([cell for cell, _ in pieces])[np.searchsorted(starts, tiles[:, 1], side="right") - 1]
        counts = pair_counts(tiles)
        pairs = np.zeros((self.shards, self.cells, self.cells), dtype=counts.dtype)
        np.add.at(pairs, (tiles[:, 0] // self.cells, query_cells, tiles[:, 0] % self.cells), counts)
        return pairs


def count_pairs(slices: Slices, edges: Integers) -> Integers:
    """Returns the number of visible pairs of the whole sequence in each cell: [query cells, key cells]."""
    sequence = [range(int(edges[-1]))]
    return KeyCells([sequence], edges).pairs(sequence, slices)[0]


def count_positions(spans: Iterable[range], edges: Integers) -> Integers:
    """Returns the number of positions of the spans in each cell: [cells]."""
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    for cell, piece in cut_at_edges(spans, edges):
        counts[cell] += len(piece)
    return counts


def cell_areas(edges: Integers) -> Integers:
    """Returns the number of pairs of each cell, visible or not: [query cells, key cells]."""
    sizes = np.diff(edges)
    sizes = widen(sizes, int(sizes.max()), int(sizes.max()))
    return sizes[:, None] * sizes[None, :]
