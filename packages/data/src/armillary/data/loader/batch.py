"""A batch: one rank's shard of the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from armillary.core import LabelTriples, SequenceLayout
from armillary.data.store import IGNORE

Documents = tuple[tuple[int, ...], ...]
"""Document boundaries of each row of a batch."""
Parents = tuple[tuple[int, ...], ...]
"""For each row of trees in a batch, the parent of each of its segments, or -1."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's shard of B rows of N tokens: T tokens of each.

    Args:
        tokens: int64 [B, T].
        labels: int64 [B, T], for each token the next token of its document, or `IGNORE`. In rows of trees these are
            `LabelTriples`: a token has several labels if the tree branches after it.
        positions: int64 [B, T], counted from the start of the row, or with `reset_positions` from the start of the
            document in the row; in rows of trees along the path from the root.
        documents: boundaries of each row's documents (0, end of the first, ..., N), equal on all shards. Attention
            masks take them as their argument `documents`. Padding at the end of a row counts as a document. For trees
            these are the boundaries of segments.
        layout: layout of the rows over shards.
        rows: numbers of the B rows, counted over all steps; empty for batches that no loader has made.
        parents: for rows of trees, the parent of each segment of each row, or -1; else None. `documents` and `parents`
            define the mask of trees.
    """

    tokens: Tensor
    labels: Tensor | LabelTriples
    positions: Tensor
    documents: Documents
    layout: SequenceLayout
    rows: range = range(0)
    parents: Parents | None = None

    @property
    def labelled(self) -> float:
        """Number of labels in this shard, or the sum of their weights."""
        if isinstance(self.labels, LabelTriples):
            return float(self.labels.weights.sum())
        return int((self.labels != IGNORE).sum())

    def of_row(self, i: int) -> Batch:
        """Returns a batch of row `i` alone."""
        row = slice(i, i + 1)
        return replace(
            self,
            tokens=self.tokens[row],
            labels=self.labels.row(i) if isinstance(self.labels, LabelTriples) else self.labels[row],
            positions=self.positions[row],
            documents=self.documents[row],
            rows=self.rows[row],
            parents=None if self.parents is None else self.parents[row],
        )
