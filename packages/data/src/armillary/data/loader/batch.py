"""What one rank holds of a step's rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from armillary.core import SequenceLayout

IGNORE = -100
"""Stands in `Batch.labels` where a token has no label; what `torch.nn.functional.cross_entropy` ignores by default."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's shard of B rows of N tokens: T tokens of each.

    Args:
        tokens: int64 [B, T].
        labels: int64 [B, T], the token that follows each of `tokens` in its document, or `IGNORE`.
        positions: int64 [B, T], counted from the start of the row or, if they are reset, of the document's piece.
        documents: for each row the boundaries of its documents (0, end of the first, ..., N), the same on all shards:
            what an attention mask takes. Padding at the end of a row is a document of its own.
        layout: which tokens of the rows each shard holds.
        rows: numbers of the B rows among all rows ever read; none where they have no numbers.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: tuple[tuple[int, ...], ...]
    layout: SequenceLayout
    rows: range = range(0)

    @property
    def labelled(self) -> int:
        """Tokens of this shard that have a label."""
        return int((self.labels != IGNORE).sum())

    def of_row(self, i: int) -> Batch:
        """Row `i` of the B by itself."""
        row = slice(i, i + 1)
        return Batch(
            self.tokens[row], self.labels[row], self.positions[row], self.documents[row], self.layout, self.rows[row]
        )
