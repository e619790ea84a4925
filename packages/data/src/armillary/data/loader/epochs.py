"""`Epochs` numbers the rows of one store over all epochs. `read_shard` reads the tokens and labels of a row's shard."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import Lock

import numpy as np

from armillary.core.parts import Spans
from armillary.data.loader.batch import IGNORE
from armillary.data.packing import DocumentPiece, Packed, Packing
from armillary.data.shuffle import Index, permutation
from armillary.data.store import TokenStore


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A row of N tokens as pieces of documents, before tokens are read.

    Args:
        pieces: pieces of documents of `store`, in order.
        ends: boundaries of the pieces in the row: 0, end of the first, ..., N. Padding counts as one more piece.
    """

    store: TokenStore
    pieces: list[DocumentPiece]
    ends: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Number of padding tokens, at the end of the row."""
        return self.ends[-1] - self.ends[len(self.pieces)]


@dataclass(frozen=True)
class Waste:
    """Cost of a packing in one epoch.

    Args:
        rows: number of rows, of N tokens each.
        padding: fraction of the rows' tokens that are padding.
        dropped: fraction of the store's tokens that are in no row.
        cut: fraction of the documents that no row contains completely.
    """

    rows: int
    padding: float
    dropped: float
    cut: float


class Epochs:
    """The rows of a store, numbered over all epochs. An epoch shuffles the documents, packs them and shuffles the rows.

    Args:
        length: tokens of a row, N.
        key: key of all shuffles, which contains the seed.

    Raises:
        ValueError: a store without tokens, or a packing that puts no tokens or more than N into a row.
    """

    def __init__(self, store: TokenStore, length: int, packing: Packing, key: str) -> None:
        self._store, self._length, self._packing, self._key = store, length, packing, key
        self._documents = np.flatnonzero(store.lengths)
        self._sizes = store.lengths[self._documents]
        if not len(self._documents):
            raise ValueError(f"{store.name} has no tokens; give a store with at least one document")
        # Two epochs: at the end of an epoch the prefetching thread already reads rows of the next one.
        self._packed = lru_cache(maxsize=2)(self._pack)
        self._lock = Lock()
        self.rows = len(self._epoch(0)[0])
        """Rows of each epoch."""

    def row(self, number: int) -> PackedRow:
        """Returns row `number`, counted from 0 over all epochs."""
        epoch, index = divmod(number, self.rows)
        packed_rows, order = self._epoch(epoch)
        # The packing counts only documents with tokens.
        pieces = [
            DocumentPiece(int(self._documents[piece.document]), piece.start, piece.length)
            for piece in packed_rows.row(int(order[index]))
        ]
        ends = tuple(accumulate((piece.length for piece in pieces), initial=0))
        return PackedRow(self._store, pieces, ends if ends[-1] == self._length else (*ends, self._length))

    def waste(self) -> Waste:
        """Returns the cost of the packing in the first epoch."""
        packed_rows, sizes = self._epoch(0)[0], self._sizes
        packed_tokens = int(packed_rows.lengths.sum())
        uncut = int((packed_rows.lengths == sizes[packed_rows.documents]).sum())  # pieces that are full documents
        return Waste(
            rows=len(packed_rows),
            padding=1 - packed_tokens / (len(packed_rows) * self._length),
            dropped=1 - packed_tokens / int(sizes.sum()),
            cut=1 - uncut / len(sizes),
        )

    def _epoch(self, number: int) -> tuple[Packed, Index]:
        """Returns the rows of an epoch and the order in which they are read."""
        with self._lock:  # a second thread waits, instead of packing the same epoch again
            return self._packed(number)

    def _pack(self, epoch: int) -> tuple[Packed, Index]:
        """Packs an epoch. Called by `_epoch`, which caches the result."""
        key = f"{self._key}, epoch {epoch}"
        packed_rows = self._packing(self._sizes, self._length, f"documents of {key}")
        # `row` derives the epoch from the number of a row, so every epoch must have the same number of rows.
        if epoch and len(packed_rows) != self.rows:
            raise ValueError(f"the packing made {len(packed_rows)} rows of epoch {epoch}, but {self.rows} of epoch 0")
        # A packing may be a user's function, so its rows are checked. `tokens_before` has a total for each piece and
        # one for the end; their differences at first pieces are the tokens of each row.
        tokens_before = np.concatenate([[0], np.cumsum(packed_rows.lengths)])
        sizes = np.diff(tokens_before[packed_rows.first])
        if sizes.min() < 1 or sizes.max() > self._length:
            row = int(np.argmax((sizes < 1) | (sizes > self._length)))
            raise ValueError(f"the packing put {sizes[row]} tokens into row {row}, not 1 to {self._length}")
        return packed_rows, permutation(len(packed_rows), f"rows of {key}")


def read_shard(row: PackedRow, spans: Spans, tokens: Index, labels: Index, starts: Index | None = None) -> None:
    """Reads a shard of a row, the tokens at its positions `spans`, into arrays that the caller allocates.

    Args:
        tokens: int64 [T], receives the tokens. Padding is the end-of-document token, or 0 if the store does not record
            one.
        labels: int64 [T], receives for each token the next token of the same document, or the store's label of it, or
            `IGNORE`.
        starts: int64 [T], receives the position in the row of the first token of each token's piece, from which
            `reset_positions` counts. None if positions are not reset.
    """
    # Reads piece by piece, in the order of the shard's tokens. `offset` is the number of tokens read so far.
    offset = 0
    for span in spans:
        for number, positions in _cut_at(span, row.ends):
            target = slice(offset, offset + len(positions))
            offset = target.stop
            if starts is not None:
                starts[target] = row.ends[number]
            if number < len(row.pieces):
                _read_piece(row, number, positions, tokens[target], labels[target])
            else:  # padding
                tokens[target], labels[target] = row.store.vocabulary.end_of_document or 0, IGNORE


def _read_piece(row: PackedRow, number: int, positions: range, tokens: Index, labels: Index) -> None:
    """Reads the tokens and labels at some positions of a row, all in piece `number`, into arrays of their length."""
    piece, store = row.pieces[number], row.store
    shift = piece.start - row.ends[number]  # from positions in the row to token indices in the document
    start, stop = positions.start + shift, positions[-1] + 1 + shift
    document_length = int(store.stops[piece.document] - store.starts[piece.document])
    label_stop = min(stop + 1, document_length)  # the last token of a document has no label
    if positions.step == 1 and store.labels is None:
        window = store.read(piece.document, start, label_stop)  # one read serves tokens and labels
        tokens[:], next_tokens = window[: len(positions)], window[1:]
    else:
        # With a step, the next token of a token is not the shard's next token: labels are read separately.
        tokens[:] = store.read(piece.document, start, stop, positions.step)
        next_tokens = store.read_labels(piece.document, start + 1, label_stop, positions.step)
    labels[: len(next_tokens)], labels[len(next_tokens) :] = next_tokens, IGNORE


def _cut_at(span: range, ends: tuple[int, ...]) -> list[tuple[int, range]]:
    """Cuts a span at the boundaries of a row's pieces. Returns (number of the piece, positions of the span in it)."""
    cuts: list[tuple[int, range]] = []
    while span:
        number = bisect_right(ends, span[0]) - 1
        # Positions of the span before the piece ends, rounded up because span[0] counts too.
        count = -(-(ends[number + 1] - span[0]) // span.step)
        cuts.append((number, span[:count]))
        span = span[count:]
    return cuts
