"""The mask as a square of cells, and the cells of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from armillary.attention import AttentionMask
from armillary.core import SequenceLayout

MOST_CELLS = 64
"""Cells to a side, unless there are more than 32 shards."""

Cells2D = NDArray[np.bool_]
"""[cells of queries, cells of keys]."""


@dataclass(frozen=True)
class MaskCells:
    """A mask drawn by some positions of the sequence: all of them, or one for each cell of a longer sequence.

    Args:
        positions: [cells].
        shards: [cells] shard of the sequence axis that has each position.
        owners: [cells] rank that has each position outside of attention.
        visible: visible (query, key) pairs.
    """

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    owners: NDArray[np.int64]
    visible: Cells2D

    @classmethod
    def of(cls, layout: SequenceLayout, mask: AttentionMask, ulysses: int = 1) -> MaskCells:
        """Chooses positions. Neighbouring cells are of different shards if the layout is striped.

        Args:
            layout: layout over the sequence axis.
            ulysses: ranks of the head axis, which divide each shard among them.
        """
        chunks = 2 * layout.shards  # of a zigzag layout: cells end where chunks do
        count = min(layout.length, chunks * max(1, MOST_CELLS // chunks))
        edges = np.arange(count + 1) * layout.length // count
        uses, chosen_positions, chosen_shards = np.zeros(layout.shards, np.int64), list[int](), list[int]()
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            middle = (start + stop) // 2
            candidates = np.arange(middle, min(stop, middle + layout.shards))
            shards = shards_at(layout, candidates)
            best = int(uses[shards].argmin())
            uses[shards[best]] += 1
            chosen_positions.append(int(candidates[best]))
            chosen_shards.append(int(shards[best]))
        positions, tensor = np.array(chosen_positions), torch.tensor(chosen_positions)
        owners = shards_at(layout.refine(ulysses), positions)
        return cls(positions, np.array(chosen_shards), owners, mask.visible(tensor, tensor).numpy())

    def block(self, queries: Sequence[int], keys: Sequence[int]) -> Cells2D:
        """Returns the visible cells of some shards' queries and keys."""
        return self.visible & np.isin(self.shards, queries)[:, None] & np.isin(self.shards, keys)[None, :]


def shards_at(layout: SequenceLayout, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the shard of each position."""
    shards = np.zeros(len(positions), np.int64)
    for shard in range(layout.shards):
        for span in layout.spans(shard):
            inside = (span.start <= positions) & (positions < span.stop)
            shards[inside & ((positions - span.start) % span.step == 0)] = shard
    return shards


def outline(cells: Cells2D) -> str:
    """Returns an SVG path of rectangles that cover the cells: a cell is one unit."""
    path, open_runs = list[str](), dict[tuple[int, int], int]()  # columns of a rectangle, and its first row
    for row in range(len(cells) + 1):
        runs = set(row_runs(cells[row])) if row < len(cells) else set[tuple[int, int]]()
        for run in [run for run in open_runs if run not in runs]:
            start, (left, right) = open_runs.pop(run), run
            path.append(f"M{left} {start}h{right - left}v{row - start}h{left - right}z")
        for run in sorted(runs):
            open_runs.setdefault(run, row)
    return "".join(path)


def row_runs(row: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns (start, stop) of runs of true cells."""
    changes = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))
