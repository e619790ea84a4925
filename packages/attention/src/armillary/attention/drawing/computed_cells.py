"""The pairs that each rank computes, in a grid of cells, and the positions of step numbers in its picture."""

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
"""Smallest part of the picture's side that gets a step number."""
FONT_SCALE, MAX_FONT_SIZE = 200, 9
"""Points of a number as large as the picture, and of the largest number."""


class StepLabel(NamedTuple):
    """A step number in a picture, at a key position x and a query position y."""

    x: float
    y: float
    step: int
    color: str
    size: float


@dataclass(frozen=True)
class ComputedCells:
    """Pairs by cell and rank.

    Args:
        by_rank: [ranks, query cells, key cells], visible pairs that each rank computes.
        step: [query cells, key cells], the step that computes most of a cell's pairs.
    """

    blocks: ComputedBlocks
    edges: Integers
    by_rank: Integers
    step: Integers

    @classmethod
    def of(cls, blocks: ComputedBlocks, mask: AttentionMask, edges: Integers, ranks: int) -> ComputedCells:
        key_cells, cells = KeyCells(_shard_spans(blocks.key_layout), edges), len(edges) - 1
        ranks_and_steps = {(query, key): (rank, step) for rank, step, query, key in blocks.blocks}
        by_rank, step, most_pairs = np.zeros((ranks, cells, cells), np.int64), *np.zeros((2, cells, cells), np.int64)
        slices = mask.slices(blocks.layout.length)[0]
        for query, spans in enumerate(_shard_spans(blocks.layout)):
            for key, pairs in enumerate(key_cells.pairs(spans, slices)):
                rank, block_step = ranks_and_steps[query, key]
                by_rank[rank] += pairs
                # A cell may have pairs of several blocks: it shows the step of the one with most of them.
                step, most_pairs = np.where(pairs > most_pairs, block_step, step), np.maximum(pairs, most_pairs)
        return cls(blocks, edges, by_rank, step)

    def labels(self) -> Iterator[StepLabel]:
        """Yields one step number for each rectangle of a run of queries and a run of keys that is large enough."""
        if len(self.blocks.pairs) == 1:
            return
        visible, rank = self.by_rank.sum(axis=0) > 0, self.by_rank.argmax(axis=0)
        colors, centers = rank_colors(len(self.by_rank)), (self.edges[:-1] + self.edges[1:]) / 2
        runs = product(_runs(self.blocks.layout, self.edges), _runs(self.blocks.key_layout, self.edges))
        for (q0, q1), (k0, k1) in runs:
            cells = visible[q0:q1, k0:k1]
            # The mean width of the visible part across its longer side decides the size of the number.
            longer_side = max(int(cells.any(axis=axis).sum()) for axis in (0, 1))
            size = FONT_SCALE * int(cells.sum()) / max(longer_side, 1) / len(visible)
            if size >= FONT_SCALE * MIN_SHARE * 0.9:
                y, x = np.add((q0, k0), _middle(cells))
                color, center = text_color(colors[rank[y, x]]), (float(centers[x]), float(centers[y]))
                yield StepLabel(*center, int(self.step[y, x]), color, min(size, MAX_FONT_SIZE))


def has_steps(layout: SequenceLayout) -> bool:
    """Returns True if neighbouring positions are in different shards."""
    return any(span.step > 1 for spans in _shard_spans(layout) for span in spans)


def _shard_spans(layout: SequenceLayout) -> list[Any]:
    return [layout.spans(shard) for shard in range(layout.shards)]


def _runs(layout: SequenceLayout, edges: Integers) -> list[tuple[int, int]]:
    """Returns runs of positions of one shard, as cells; without those that are too small for a number."""
    if has_steps(layout):
        return [(p, p + 1) for p in range(layout.length)] if layout.length <= 1 / MIN_SHARE else []
    spans = [span for spans in _shard_spans(layout) for span in spans if len(span) >= MIN_SHARE * layout.length]
    return [tuple(np.searchsorted(edges, (span.start, span.stop)).tolist()) for span in spans]


def _middle(cells: Any) -> tuple[int, int]:
    """Returns the cell that is True and nearest to the mean of all such cells."""
    rows, columns = np.nonzero(cells)
    distances = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    nearest = int(distances.argmin())
    return int(rows[nearest]), int(columns[nearest])
