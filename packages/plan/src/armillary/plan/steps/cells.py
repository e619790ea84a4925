"""The mask as a square of cells, and the cells of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from armillary.attention import AttentionMask
from armillary.attention.mask.blocks import rectangles
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
        # From the middle of each cell on, the position of the shard that has been chosen least often so far: a striped
        # layout would otherwise show the same shard in every cell.
        uses, chosen_positions, chosen_shards = np.zeros(layout.shards, np.int64), list[int](), list[int]()
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            middle = (start + stop) // 2
            candidates = np.arange(middle, min(stop, middle + layout.shards))
            shards = layout.shards_at(candidates)
            best = int(uses[shards].argmin())
            uses[shards[best]] += 1
            chosen_positions.append(int(candidates[best]))
            chosen_shards.append(int(shards[best]))
        positions, tensor = np.array(chosen_positions), torch.tensor(chosen_positions)
        owners = layout.refine(ulysses).shards_at(positions)
        return cls(positions, np.array(chosen_shards), owners, mask.visible(tensor, tensor).numpy())

    def block(self, queries: Sequence[int], keys: Sequence[int]) -> Cells2D:
        """Returns the visible cells of some shards' queries and keys."""
        return self.visible & np.isin(self.shards, queries)[:, None] & np.isin(self.shards, keys)[None, :]


def outline(cells: Cells2D) -> str:
    """Returns an SVG path of rectangles that cover the cells: a cell is one unit."""
    return "".join(f"M{c0} {r0}h{c1 - c0}v{r1 - r0}h{c0 - c1}z" for r0, r1, c0, c1 in rectangles(cells))
