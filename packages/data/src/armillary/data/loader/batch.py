"""What one rank holds of a step's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from armillary.core import SequenceLayout
from armillary.core.labels import LabelTriples

IGNORE = -100
"""Stands in `Batch.labels` where a token has no label; what `torch.nn.functional.cross_entropy` ignores by default."""


Documents = tuple[tuple[int, ...], ...]
"""Boundaries of the documents of each row of a batch."""
Parents = tuple[tuple[int, ...], ...]
"""For each row of a batch, the piece that each of its pieces follows, or -1."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's shard of B rows of N tokens: T tokens of each.

    Args:
        tokens: int64 [B, T].
        labels: int64 [B, T], the token that follows each of `tokens` in its document, or `IGNORE`; or, from stores of
            trees, the triples of `tokens`: those at which a tree branches have several labels.
        positions: int64 [B, T], counted from the start of the row or, if they are reset, of the document's piece.
        documents: for each row the boundaries of its documents (0, end of the first, ..., N), the same on all shards:
            what an attention mask takes. Padding at the end of a row is a document of its own. Of trees, the boundaries
            of their segments.
        layout: which tokens of the rows each shard holds.
        rows: numbers of the B rows among all rows ever read; none where they have no numbers.
        parents: from stores of trees, for each row the segment that each of its segments follows, or -1: with
            `documents` what a mask of trees takes.
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
        """Tokens of this shard that have a label, an integer; or the sum of its labels' weights."""
        if isinstance(self.labels, LabelTriples):
            return float(self.labels.weights.sum())
        return int((self.labels != IGNORE).sum())

    def of_row(self, i: int) -> Batch:
        """Row `i` of the B by itself."""
        row = slice(i, i + 1)
        labels = self.labels.row(i) if isinstance(self.labels, LabelTriples) else self.labels[row]
        return replace(
            self,
            tokens=self.tokens[row],
            labels=labels,
            positions=self.positions[row],
            documents=self.documents[row],
            rows=self.rows[row],
            parents=None if self.parents is None else self.parents[row],
        )
