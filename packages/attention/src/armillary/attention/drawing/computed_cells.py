"""Which rank computes what, in a grid of cells, and where the numbers of steps stand in a picture of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from armillary.attention.drawing.cells import KeyCells
from armillary.attention.drawing.colors import Colors, colors_of, text_on
from armillary.attention.drawing.shares import ComputedBlocks
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.slices import Integers

SMALLEST = 1 / 40
"""Of the whole side: what is smaller gets no number."""
POINTS = 200
"""Of a number, for what is as large as the whole side; not above the largest."""
LARGEST_POINTS = 9


class StepLabel(NamedTuple):
    x: float
    y: float
    step: int
    color: str
    size: float


@dataclass(frozen=True)
class ComputedCells:
    """Pairs by cell and rank.

    Args:
        by_rank: [ranks, cells of queries, cells of keys] visible pairs that each rank computes.
        step: [cells, cells] at which step most of a cell's pairs are computed.
    """

    blocks: ComputedBlocks
    edges: Integers
    by_rank: Integers
    step: Integers

    @classmethod
    def of(cls, blocks: ComputedBlocks, mask: AttentionMask, edges: Integers, ranks: int) -> ComputedCells:
        keys, cells = KeyCells(_shards(blocks.key_layout), edges), len(edges) - 1
        turns = {(query, key): (rank, step) for rank, step, query, key in blocks.blocks}
        by_rank, step, most = np.zeros((ranks, cells, cells), np.int64), *np.zeros((2, cells, cells), np.int64)
        slices = mask.slices(blocks.layout.length)[0]
        for query, spans in enumerate(_shards(blocks.layout)):
            for key, found in enumerate(keys.seen_by(spans, slices)):
                rank, turn = turns[query, key]
                by_rank[rank] += found
                step, most = np.where(found > most, turn, step), np.maximum(found, most)
        return cls(blocks, edges, by_rank, step)

    @property
    def colors(self) -> Colors:
        return colors_of(len(self.by_rank))

    def labels(self) -> Iterator[StepLabel]:
        """One number in each rectangle of a run of queries and a run of keys, where it is large enough to be read."""
        seen, rank = self.by_rank.sum(axis=0) > 0, self.by_rank.argmax(axis=0)
        several = len(self.blocks.pairs) > 1
        runs = product(_runs(self.blocks.layout, self.edges), _runs(self.blocks.key_layout, self.edges))
        for (q0, q1), (k0, k1) in runs if several else ():
            some = seen[q0:q1, k0:k1]
            size = POINTS * _breadth(some) / len(seen)
            if size >= POINTS * SMALLEST * 0.9:
                y, x = np.add((q0, k0), _middle(some))
                color = text_on(self.colors[rank[y, x]])
                at = _center(self.edges, x), _center(self.edges, y)
                yield StepLabel(*at, int(self.step[y, x]), color, min(size, LARGEST_POINTS))


def _shards(layout: SequenceLayout) -> list[Any]:
    return [layout.spans(shard) for shard in range(layout.shards)]


def has_steps(layout: SequenceLayout) -> bool:
    """Whether neighbouring positions are of several shards."""
    return any(span.step > 1 for spans in _shards(layout) for span in spans)


def _runs(layout: SequenceLayout, edges: Integers) -> list[tuple[int, int]]:
    """Runs of positions of one shard, as cells; none where they are too small."""
    if has_steps(layout):
        return [(p, p + 1) for p in range(layout.length)] if layout.length <= 1 / SMALLEST else []
    spans = [span for spans in _shards(layout) for span in spans if len(span) >= SMALLEST * layout.length]
    return [tuple(np.searchsorted(edges, (span.start, span.stop)).tolist()) for span in spans]


def _breadth(some: Any) -> float:
    """How many cells are there, to each that they reach along their longer side."""
    longer = max(int(some.any(axis=axis).sum()) for axis in (0, 1))
    return int(some.sum()) / max(longer, 1)


def _middle(some: Any) -> tuple[int, int]:
    """The cell with something in it that is nearest to the middle of them all."""
    rows, columns = np.nonzero(some)
    apart = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    nearest = int(apart.argmin())
    return int(rows[nearest]), int(columns[nearest])


def _center(edges: Integers, cell: int) -> float:
    return float(edges[cell] + edges[cell + 1]) / 2
