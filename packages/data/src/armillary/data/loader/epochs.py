"""The rows of one store, epoch after epoch, and what a shard reads of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import Lock

import numpy as np

from armillary.core.layout import Spans, cut_at
from armillary.data.loader.batch import IGNORE
from armillary.data.packing import DocumentSlice, Packed, Packing
from armillary.data.shuffle import Index, permutation
from armillary.data.store import TokenStore


@dataclass(frozen=True, eq=False)
class PackedRow:
    """What a row of N tokens is made of; nothing is read yet.

    Args:
        slices: of documents of `store`, in order.
        ends: boundaries of the pieces in the row (0, end of the first, ..., N); padding is one more piece, the last.
    """

    store: TokenStore
    slices: list[DocumentSlice]
    ends: tuple[int, ...]

    @property
    def origins(self) -> Sequence[int]:
        """The positions of the row from which those of each piece are counted, if they are reset."""
        return self.ends

    @property
    def padding(self) -> int:
        """Tokens at the end that are of no document."""
        return self.ends[-1] - self.ends[len(self.slices)]


@dataclass(frozen=True)
class Waste:
    """What a packing of one epoch costs.

    Args:
        rows: of N tokens each.
        padding: share of their tokens that are of no document.
        dropped: share of the documents' tokens that are in no row.
        cut: share of the documents that are in several rows, or not whole.
    """

    rows: int
    padding: float
    dropped: float
    cut: float


class Epochs:
    """All rows that a store ever gives, by number. Each epoch packs the documents anew, in an order of its own.

    Args:
        length: tokens of a row, N.
        key: of all shuffles.

    Raises:
        ValueError: a store without any token.
    """

    def __init__(self, store: TokenStore, length: int, packing: Packing, key: str) -> None:
        self._store, self._length, self._packing, self._key = store, length, packing, key
        self._documents, self._sizes = self._items()
        if not len(self._documents):
            raise ValueError(f"{store.name} holds no tokens; give a store with at least one document")
        # Two, since those who look ahead are in the next epoch while others are still in this one.
        self._packed = lru_cache(maxsize=2)(self._pack)
        self._lock = Lock()
        self.rows = len(self._epoch(0)[0])
        """Rows of each epoch."""

    def _items(self) -> tuple[Index, Index]:
        """What is packed: of which document each item is, and its tokens."""
        documents = np.flatnonzero(self._store.lengths)
        return documents, self._store.lengths[documents]

    def row(self, number: int) -> PackedRow:
        """PackedRow `number`, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.rows)
        packed, order = self._epoch(epoch)
        return self._row_of(packed.row(int(order[place])))

    def _row_of(self, pieces: Sequence[DocumentSlice]) -> PackedRow:
        """The row of pieces of items."""
        pieces = [DocumentSlice(int(self._documents[p.document]), p.start, p.length) for p in pieces]
        ends = tuple(accumulate((piece.length for piece in pieces), initial=0))
        return PackedRow(self._store, pieces, ends if ends[-1] == self._length else (*ends, self._length))

    def waste(self) -> Waste:
        """What this packing costs in one epoch."""
        packed, lengths = self._epoch(0)[0], self._sizes
        held, tokens = int(packed.lengths.sum()), int(lengths.sum())
        whole = int((packed.lengths == lengths[packed.documents]).sum())
        padding = 1 - held / (len(packed) * self._length)
        return Waste(len(packed), padding, 1 - held / tokens, 1 - whole / len(lengths))

    def _epoch(self, number: int) -> tuple[Packed, Index]:
        """The rows of an epoch, and the order in which they are read."""
        with self._lock:  # who needs it meanwhile waits, instead of packing it too
            return self._packed(number)

    def _pack(self, epoch: int) -> tuple[Packed, Index]:
        key = f"{self._key}, epoch {epoch}"
        packed = self._packing(self._sizes, self._length, f"documents of {key}")
        if epoch and len(packed) != self.rows:
            raise ValueError(f"the packing made {len(packed)} rows of epoch {epoch}, but {self.rows} of epoch 0")
        sizes = np.diff(np.concatenate([[0], np.cumsum(packed.lengths)])[packed.first])
        if sizes.min() < 1 or sizes.max() > self._length:
            row = int(np.argmax((sizes < 1) | (sizes > self._length)))
            raise ValueError(f"the packing put {sizes[row]} tokens into row {row}, not 1 to {self._length}")
        return packed, permutation(len(packed), f"rows of {key}")


def read_shard(row: PackedRow, spans: Spans, tokens: Index, labels: Index, starts: Index | None = None) -> None:
    """Fills in what the shard with these spans holds of a row: int64 [T] each.

    Labels are the next tokens of the same document, read along with the tokens, or `IGNORE`. Padding is the end of
    document, or 0 where a store does not know its own.

    Args:
        starts: gets the positions in the row from which those of the tokens' documents are counted.
    """
    at, origins = 0, row.origins
    for span in spans:
        for number, part in cut_at(span, row.ends):
            to = slice(at, at + len(part))
            at = to.stop
            if starts is not None:
                starts[to] = origins[number]
            if number < len(row.slices):
                _read_part(row, number, part, tokens[to], labels[to])
            else:
                tokens[to], labels[to] = row.store.vocabulary.end_of_document or 0, IGNORE


def _read_part(row: PackedRow, number: int, part: range, tokens: Index, labels: Index) -> None:
    """Fills in tokens and labels of positions of the row that lie in one piece."""
    piece, store = row.slices[number], row.store
    shift = piece.start - row.ends[number]
    start, stop = part.start + shift, part[-1] + 1 + shift
    size = int(store.stops[piece.document] - store.starts[piece.document])
    after = min(stop + 1, size)
    if part.step == 1:
        found = store.read(piece.document, start, after)
        tokens[:], next_ones = found[: len(part)], found[1:]
    else:
        tokens[:] = store.read(piece.document, start, stop, part.step)
        next_ones = store.read(piece.document, start + 1, after, part.step)
    labels[: len(next_ones)], labels[len(next_ones) :] = next_ones, IGNORE
