"""Rows of N tokens, of which each rank reads only those that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

import torch
from torch import Tensor

from armillary.core import SequenceLayout
from armillary.data.corpus import Document
from armillary.data.order import permutation
from armillary.data.tokens import ByteTokenizer, Tokenizer

IGNORE = -100
"""Stands in `Batch.labels` where a token has no label; what `torch.nn.functional.cross_entropy` ignores by default."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank holds of a batch of rows.

    Args:
        tokens: int64 [B, T].
        labels: int64 [B, T], the token that follows each of `tokens` in its whole row, or `IGNORE`.
        positions: int64 [T], where in the row the tokens stand.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor


class PackedSequences:
    """Batches of rows of exactly N tokens, cut out of all documents joined; this rank's shard of them.

    The documents are joined in an order shuffled by `seed`, each followed by an end of document, and cut every N
    tokens. A last row that lacks tokens, or the one after it that its last label takes, is dropped. An epoch reads
    every row once, in an order of its own. A batch may hold the last rows of one epoch and the first of the next.

    Rows and their order depend on the documents, N, the tokenizer and the seed alone, so those must be the same on all
    ranks; layouts and the number of ranks only change which rank holds what. To resume, go on from the next step.

    Args:
        documents: in the same order on all ranks; kept in memory as tokens.
        layout: cuts rows of `layout.length` tokens, N, into shards.
        shard: the shard of `layout` that this rank holds.
        rows_per_batch: rows of one replica's batch, B.
        replica, replicas: this rank reads part `replica` of each global batch of rows_per_batch * replicas rows. Ranks
            that hold shards of the same rows have the same `replica`.
        tokenizer: by default, bytes.

    Raises:
        ValueError: no such shard or replica, rows_per_batch or replicas below 1, too few tokens for one row.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        layout: SequenceLayout,
        shard: int,
        rows_per_batch: int,
        seed: int = 0,
        replica: int = 0,
        replicas: int = 1,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        _check_rows(rows_per_batch, replica, replicas)
        self._positions = layout.positions(shard)
        self._length = layout.length
        self._rows_per_batch, self._replica, self._replicas = rows_per_batch, replica, replicas
        self._seed = seed
        self._stream = _join(documents, tokenizer or ByteTokenizer(), seed)
        _check_length(len(self._stream), self._length)
        # The order of rows of the epoch last read, since the next step mostly reads the same one.
        self._order = (-1, torch.empty(0))

    @property
    def rows_per_epoch(self) -> int:
        """Rows that each epoch reads, all replicas together."""
        # Each row looks one token past its end, for its last label.
        return (len(self._stream) - 1) // self._length

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one step, all replicas and shards together."""
        return self._rows_per_batch * self._replicas * self._length

    def batch(self, step: int) -> Batch:
        """The batch of any step, counted from 0. Epochs follow one another without end.

        Raises:
            ValueError: a step below 0.
        """
        if step < 0:
            raise ValueError(f"steps count from 0; got {step}")
        first = (step * self._replicas + self._replica) * self._rows_per_batch
        starts = torch.tensor([self._start(row) for row in range(first, first + self._rows_per_batch)])
        index = starts[:, None] + self._positions
        # A copy of the positions: whoever changes a batch in place must not change what is read next.
        return Batch(self._stream[index].long(), self._stream[index + 1].long(), self._positions.clone())

    def __iter__(self) -> Iterator[Batch]:
        """batch(0), batch(1), ... without end."""
        return map(self.batch, count())

    def _start(self, row: int) -> int:
        """Where in the stream the row begins that is read as number `row`, counted over all epochs."""
        epoch, place = divmod(row, self.rows_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self.rows_per_epoch, f"rows of epoch {epoch}, seed {self._seed}"))
        return int(self._order[1][place]) * self._length


def _join(documents: Sequence[Document], tokenizer: Tokenizer, seed: int) -> Tensor:
    """All documents as one tensor of tokens, shuffled, each followed by an end of document."""
    order = cast(list[int], permutation(len(documents), f"documents, seed {seed}").tolist())
    texts = (tokenizer.encode(documents[i].text) for i in order)
    parts = [part for text in texts for part in (text, text.new_full((1,), tokenizer.end_of_document))]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _check_rows(rows_per_batch: int, replica: int, replicas: int) -> None:
    if rows_per_batch < 1:
        raise ValueError(f"rows_per_batch must be at least 1; got {rows_per_batch}")
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1; got {replicas}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} is not one of the {replicas} replicas 0..{replicas - 1}")


def _check_length(tokens: int, length: int) -> None:
    if tokens < length + 1:
        raise ValueError(
            f"the documents make {tokens} tokens, but one row of {length} takes {length + 1} (one more for labels); "
            "give more text or a shorter sequence"
        )
