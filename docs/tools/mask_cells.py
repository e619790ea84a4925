"""The work of each rank and step under a mask, from the method's communication plan, counted in a grid of cells.

Builds no N x N array, so N may be large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from palette import rank_colors, text_color

from armillary.attention import AttentionMask, AttentionShape
from armillary.attention.internal import MethodOptions, named_method
from armillary.attention.method_registry import DEFAULT_OPTIONS
from armillary.attention.plans import JoinedShards
from armillary.attention.tiling.tiles import SpanTable, pair_counts, tile_array
from armillary.core import SequenceLayout
from armillary.core.internal import Integers, Slices, widen

MIN_SHARE = 1 / 40
"""Smallest width of an area that gets a step number, as a fraction of the picture's side."""
FONT_SCALE, MAX_FONT_SIZE = 200, 9
"""Font sizes in points: of a number as wide as the picture, by which others are scaled, and the upper limit."""


# The work of each rank.


class BlockWork(NamedTuple):
    """A block of forward: the rank of the sequence axis and the step that compute it, and its two shards.

    Args:
        query, key: shard numbers in `ComputedBlocks.layout` and `ComputedBlocks.key_layout`.
    """

    rank: int
    step: int
    query: int
    key: int


@dataclass(frozen=True)
class ComputedBlocks:
    """The blocks that a method computes in forward, from its communication plan.

    Args:
        layout, key_layout: layouts of the query shards and of the key shards that blocks refer to by number.
        blocks: the block of each rank in each step, with or without visible pairs.
        pairs: `pairs[step][rank]`, the number of visible pairs in one head and one row of the batch.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    blocks: tuple[BlockWork, ...]
    pairs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shares:
    """The tokens and the visible pairs of each rank of the sequence axis.

    Args:
        length: tokens of the sequence.
        pairs: visible (query, key) pairs in one row of the batch.
        tokens: number of tokens of each rank.
        by_step: `by_step[rank][step]`, the number of visible pairs that a rank computes in a step.
    """

    length: int
    pairs: int
    tokens: tuple[int, ...]
    by_step: tuple[tuple[int, ...], ...]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Number of visible pairs that each rank computes in all steps."""
        return tuple(map(sum, self.by_step))

    @property
    def imbalance(self) -> float:
        """The largest number of pairs of a rank, divided by the mean over ranks: 1 if all ranks have equal work."""
        return max(self.by_rank) * len(self.by_rank) / max(self.pairs, 1)

    @property
    def as_dict(self) -> dict[str, Any]:
        """All fields and properties, for JSON."""
        return asdict(self) | {"by_rank": self.by_rank, "imbalance": self.imbalance}


def join_shards(layout: SequenceLayout, shards: JoinedShards | None) -> SequenceLayout:
    """Returns the layout whose shards are the given groups of shards of `layout`; None: `layout` itself."""
    if shards is None:
        return layout
    return SequenceLayout([[span for shard in group for span in layout.spans(shard)] for group in shards])


def blocks_of(
    layout: SequenceLayout, mask: AttentionMask, method: str, options: MethodOptions = DEFAULT_OPTIONS
) -> ComputedBlocks:
    """Returns the blocks that a method computes in forward. The ranks of a head axis count as one rank.

    Args:
        method: a name of `build_attention`.

    Raises:
        ValueError: the name is unknown, the method has no sequence axis for the layout's shards, or its communication
            plan lists no blocks.
    """
    method_entry = named_method(method, options)
    method_entry.check_used(method_entry.mesh_axes({"ring": layout.shards}))
    work = AttentionShape.of(layout, mask, heads=1, kv_heads=1, head_dim=1, dtype=torch.float32)
    plan = method_entry.sequence_plan(layout.shards).comm_plan(work)
    steps = [step for step in plan.forward if step.pairs]  # the others only communicate
    if not all(step.blocks for step in steps):
        raise ValueError(f"attention method {method!r} cannot be drawn: the steps of its comm_plan have no blocks")
    return ComputedBlocks(
        join_shards(layout, plan.query_shards),
        join_shards(layout, plan.key_shards),
        tuple(
            BlockWork(rank, i, *block)
            for i, step in enumerate(steps)
            for rank, block in enumerate(step.blocks)
            if block
        ),
        tuple(step.pairs for step in steps),
    )


def shares_of(
    mask: AttentionMask,
    layout: SequenceLayout,
    method: str = "ring",
    row: int = 0,
    options: MethodOptions = DEFAULT_OPTIONS,
) -> Shares:
    """Returns the work of each rank in forward, for one row of the batch and one head.

    Args:
        layout: layout over the sequence axis, with one shard for each of its ranks.
        method: a name of `build_attention`.

    Raises:
        ValueError: the mask has another length than the layout; errors of `blocks_of`.
    """
    mask = mask.row(row)
    by_step = blocks_of(layout, mask, method, options).pairs
    return Shares(layout.length, mask.pairs(layout.length), layout.sizes, tuple(zip(*by_step, strict=True)))


# Cells.


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


# Pairs that each rank computes.


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
