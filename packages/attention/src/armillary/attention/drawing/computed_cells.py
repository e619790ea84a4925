"""The pairs that each rank computes, counted in a grid of cells, and the step numbers written onto the picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from armillary.attention.drawing.cells import KeyCells
from armillary.attention.drawing.colors import rank_colors, text_color
from armillary.attention.drawing.shares import ComputedBlocks
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.slices import Integers

MIN_SHARE = 1 / 40
"""Smallest width of an area that gets a step number, as a fraction of the picture's side."""
FONT_SCALE, MAX_FONT_SIZE = 200, 9
"""Font sizes in points: of a number as wide as the picture, by which others are scaled, and the upper limit."""


class StepLabel(NamedTuple):
    """A step number in a picture: x is its key position, y its query position, size its font size in points."""

    x: float
    y: float
    step: int
    color: str
    size: float


@dataclass(frozen=True)
class ComputedCells:
    """The number of visible pairs that each rank computes in each cell.

    Args:
        blocks: the blocks of the method's forward.
        edges: the boundaries of the cells, [cells + 1].
        by_rank: [ranks, query cells, key cells], the number of visible pairs that each rank computes.
        step: [query cells, key cells], the step that computes most of a cell's pairs.
    """

    blocks: ComputedBlocks
    edges: Integers
    by_rank: Integers
    step: Integers

    @classmethod
    def of(cls, blocks: ComputedBlocks, mask: AttentionMask, edges: Integers, ranks: int) -> ComputedCells:
        """Counts the pairs of every block in every cell."""
        key_cells, cells = KeyCells(blocks.key_layout.spans_by_shard, edges), len(edges) - 1
        ranks_and_steps = {(query, key): (rank, step) for rank, step, query, key in blocks.blocks}
        by_rank, step, most_pairs = np.zeros((ranks, cells, cells), np.int64), *np.zeros((2, cells, cells), np.int64)
        slices = mask.slices(blocks.layout.length)[0]
        for query, spans in enumerate(blocks.layout.spans_by_shard):
            for key, pairs in enumerate(key_cells.pairs(spans, slices)):
                rank, block_step = ranks_and_steps[query, key]
                by_rank[rank] += pairs
                # A cell may have pairs of several blocks: it shows the step of the one with most of them.
                step, most_pairs = np.where(pairs > most_pairs, block_step, step), np.maximum(pairs, most_pairs)
        return cls(blocks, edges, by_rank, step)

    def labels(self) -> Iterator[StepLabel]:
        """Yields one step number for each pair of a query run and a key run that has enough visible cells.

        A run is a range of adjacent positions in one shard.
        """
        if len(self.blocks.pairs) == 1:  # a method of one step needs no numbers
            return
        visible, rank = self.by_rank.sum(axis=0) > 0, self.by_rank.argmax(axis=0)
        colors, centers = rank_colors(len(self.by_rank)), (self.edges[:-1] + self.edges[1:]) / 2
        runs = product(_runs(self.blocks.layout, self.edges), _runs(self.blocks.key_layout, self.edges))
        for (q0, q1), (k0, k1) in runs:
            cells = visible[q0:q1, k0:k1]
            # The number must fit across the visible part: its mean width is its area over its longer side, in cells.
            longer_side = max(int(cells.any(axis=axis).sum()) for axis in (0, 1))
            size = FONT_SCALE * int(cells.sum()) / max(longer_side, 1) / len(visible)
            if size >= FONT_SCALE * MIN_SHARE * 0.9:  # 10% of tolerance: runs are rounded to cells
                y, x = np.add((q0, k0), _middle(cells))
                color, center = text_color(colors[rank[y, x]]), (float(centers[x]), float(centers[y]))
                yield StepLabel(*center, int(self.step[y, x]), color, min(size, MAX_FONT_SIZE))


def has_strided_spans(layout: SequenceLayout) -> bool:
    """Returns True if neighbouring positions are in different shards, as in the striped layout."""
    return any(span.step > 1 for spans in layout.spans_by_shard for span in spans)


def _runs(layout: SequenceLayout, edges: Integers) -> list[tuple[int, int]]:
    """Returns (first cell, end cell) of each run of adjacent positions in one shard, if long enough for a number."""
    if has_strided_spans(layout):
        # Each position is a run, and a cell: a picture of so few tokens has one cell per token.
        return [(p, p + 1) for p in range(layout.length)] if layout.length <= 1 / MIN_SHARE else []
    spans = [span for spans in layout.spans_by_shard for span in spans if len(span) >= MIN_SHARE * layout.length]
    return [tuple(np.searchsorted(edges, (span.start, span.stop)).tolist()) for span in spans]


def _middle(cells: Any) -> tuple[int, int]:
    """Returns the (row, column) of the True cell that is nearest to the mean of all True cells."""
    rows, columns = np.nonzero(cells)
    distances = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    nearest = int(distances.argmin())
    return int(rows[nearest]), int(columns[nearest])
