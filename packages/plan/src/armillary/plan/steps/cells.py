"""`MaskCells`: the mask as a square of cells, and the cells of a block."""

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
"""Maximum number of cells to a side of the square, up to 32 shards. More shards have two cells each."""

Cells2D = NDArray[np.bool_]
"""A boolean for each cell: [query cells, key cells]."""


@dataclass(frozen=True)
class MaskCells:
    """A mask at one position of the sequence for each row and column of cells. Short sequences show all positions.

    Args:
        positions: [cells], the positions.
        shards: [cells], the shard of the sequence axis that has each position.
        owners: [cells], the rank that has each position outside of attention.
        visible: [cells, cells], True where the query (row) sees the key (column).
    """

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    owners: NDArray[np.int64]
    visible: Cells2D

    @classmethod
    def of(cls, layout: SequenceLayout, mask: AttentionMask, ulysses: int = 1) -> MaskCells:
        """Divides the sequence into cells and chooses a position of each.

        Args:
            layout: layout over the sequence axis.
            ulysses: number of ranks on the head axis, which divide each shard among them outside of attention.
        """
        # The number of cells is a multiple of a zigzag layout's number of chunks, so cells end where chunks end.
        chunks = 2 * layout.shards
        count = min(layout.length, chunks * max(1, MOST_CELLS // chunks))
        edges = np.arange(count + 1) * layout.length // count
        # A cell shows one of the positions from its middle on, whose shard has been chosen least often so far. In a
        # striped layout the middles of all cells may be of one shard.
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
        """Returns the visible cells whose query is of one of the shards `queries`, and whose key of one of `keys`."""
        return self.visible & np.isin(self.shards, queries)[:, None] & np.isin(self.shards, keys)[None, :]


def outline(cells: Cells2D) -> str:
    """Returns an SVG path of rectangles that cover the True cells. The side of a cell is one unit."""
    return "".join(f"M{c0} {r0}h{c1 - c0}v{r1 - r0}h{c0 - c1}z" for r0, r1, c0, c1 in rectangles(cells))
