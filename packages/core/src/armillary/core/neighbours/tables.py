"""The moves of `neighbours.moves`: the tables of tokens that each rank needs, computed on the host and cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from armillary.core import compat
from armillary.core.collectives.token_moves import MoveTable
from armillary.core.layout import SequenceLayout
from armillary.core.mesh import Axis
from armillary.core.ops import TracedAxis
from armillary.core.segments import Segmented, Segments, check_lookahead, segments_of
from armillary.core.slices import Integers
from armillary.core.validation import check_dim, check_tensor

FLAT = -1
"""Given as the dim of tokens: the tokens of several rows are flattened into dim 0, row by row."""


class TokenMove(NamedTuple):
    """A move of tokens between ranks: one for all rows of a tensor, or a different one for each row.

    Args:
        rows: number of rows with different moves; 1 if all rows move alike.
        lengths: number of tokens of each run with its halo; only for `halo`.
        fill: value of the tokens that do not exist.
    """

    axis: Axis
    table: MoveTable
    rows: int = 1
    lengths: Sequence[int] = ()
    fill: float = 0

    def tokens(self, x: Tensor, dim: int) -> Tensor:
        """Returns `x` with the tokens of `dim` on dim 0. If rows have different moves, they are flattened, row by row.

        Raises:
            ValueError: the numbers of tokens or rows are not those of the table.
        """
        if self.rows > 1 and dim != FLAT and (dim != 1 or len(x) != self.rows):
            raise ValueError(
                f"x {tuple(x.shape)}: segments of {self.rows} rows need {self.rows} rows on dim 0, and tokens on dim 1"
            )
        tokens = self.flat(x, dim)
        if len(tokens) != self.table.tokens:
            raise ValueError(
                f"x {tuple(x.shape)}: the shard has {self.table.tokens // self.rows} tokens in each of {self.rows} rows"
            )
        return tokens

    def flat(self, x: Tensor, dim: int) -> Tensor:
        """Returns the same as `tokens`, but accepts any number of tokens."""
        if dim == FLAT:
            return x
        return x.movedim(dim, 0) if self.rows == 1 else x.flatten(0, 1)

    def by_row(self, tokens: Tensor, dim: int) -> Tensor:
        """The inverse of `flat`."""
        if dim == FLAT:
            return tokens
        return tokens.movedim(0, dim) if self.rows == 1 else tokens.unflatten(0, (self.rows, -1))


def relayout_move(axis: Axis, source: SequenceLayout, target: SequenceLayout) -> TokenMove:
    """Returns the move of `relayout`."""
    return TokenMove(axis, relayout_table(source, target, axis.rank))


def shift_move(
    axis: Axis, layout: SequenceLayout, documents: object, mask: Segmented | None, offset: int, fill: float
) -> TokenMove:
    """Returns the move of `shift`. Raises ValueError for arguments that do not fit each other."""
    rows = segments_of(layout.length, documents, mask)
    check_layout(layout, axis)
    check_lookahead("offset", offset, rows)
    return TokenMove(axis, shift_table(layout, rows, offset, axis.rank), len(rows), fill=fill)


def halo_move(
    axis: Axis, layout: SequenceLayout, documents: object, mask: Segmented | None, left: int, right: int
) -> TokenMove:
    """Returns the move of `halo`. Raises ValueError for arguments that do not fit each other."""
    rows = segments_of(layout.length, documents, mask)
    check_layout(layout, axis)
    check_lookahead("right", -right, rows)
    table, lengths = halo_table(layout, rows, left, right, axis.rank)
    return TokenMove(axis, table, len(rows), lengths)


def check_layout(layout: SequenceLayout, axis: Axis | TracedAxis) -> None:
    if layout.shards != axis.size:
        raise ValueError(f"the layout has {layout.shards} shards; axis {axis.name!r} has {axis.size} ranks")


def tokens_dim(x: Tensor, dim: int) -> int:
    """Returns the dim of tokens counted from the front. Raises ValueError if x is not a tensor or has no such dim."""
    check_tensor("x", x)
    return check_dim("x", x, dim)


# Every layer and step looks up a table, for few distinct layouts and documents.
@lru_cache(maxsize=32)
@compat.outside_modes
def relayout_table(source: SequenceLayout, target: SequenceLayout, rank: int) -> MoveTable:
    """Returns the moves from `source` to `target`: a rank needs the positions of its shard of `target`."""
    return MoveTable.build(source, rank, [[target.positions(shard).numpy()] for shard in range(target.shards)])


@lru_cache(maxsize=32)
@compat.outside_modes
def shift_table(layout: SequenceLayout, rows: tuple[Segments, ...], offset: int, rank: int) -> MoveTable:
    """Returns the moves of `shift`: for each token of its shard a rank needs the token `offset` positions before."""
    positions = [layout.positions(shard).numpy() for shard in range(layout.shards)]
    return MoveTable.build(
        layout, rank, [[row.ancestors(shard_positions, offset) for row in rows] for shard_positions in positions]
    )


@lru_cache(maxsize=32)
@compat.outside_modes
def halo_table(
    layout: SequenceLayout, rows: tuple[Segments, ...], left: int, right: int, rank: int
) -> tuple[MoveTable, list[int]]:
    """Returns the moves of `halo`, and the lengths of this rank's runs with their halos, row by row."""
    # The runs of all ranks, because each rank must know which of its tokens other ranks need.
    runs = [[row.runs(spans) for row in rows] for spans in layout.spans_by_shard]
    needed_positions = [
        [
            np.concatenate([_surroundings(row, run, left, right) for run in row_runs])
            for row, row_runs in zip(rows, shard_runs, strict=True)
        ]
        for shard_runs in runs
    ]
    lengths = [left + len(run) + right for row_runs in runs[rank] for run in row_runs]
    return MoveTable.build(layout, rank, needed_positions), lengths


def _surroundings(segments: Segments, run: range, left: int, right: int) -> Integers:
    """Returns the positions of a run and its halo; -1 for halo tokens outside of its document or path."""
    tokens = np.arange(run.start, run.stop, run.step)
    # The token `distance` before the first token of the run, or after its last token; -1 if there is none.
    before = [segments.ancestors(tokens[:1], distance) for distance in range(left, 0, -1)]
    after = [segments.ancestors(tokens[-1:], -distance) for distance in range(1, right + 1)]
    return np.concatenate([*before, tokens, *after])
