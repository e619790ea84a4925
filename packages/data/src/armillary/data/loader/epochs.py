"""`Epochs`: the rows of one store over all epochs. `read_shard`: the tokens and labels of a shard of a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import Lock

import numpy as np

from armillary.core.spans import Spans
from armillary.data.loader.batch import IGNORE
from armillary.data.packing import DocumentSlice, Packed, Packing
from armillary.data.shuffle import Index, permutation
from armillary.data.store import TokenStore


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A row of N tokens as slices of documents, before tokens are read.

    Args:
        slices: slices of documents of `store`, in order.
        ends: boundaries of the slices in the row, 0, end of the first, ..., N. Padding counts as one more slice.
    """

    store: TokenStore
    slices: list[DocumentSlice]
    ends: tuple[int, ...]

    @property
    def origins(self) -> Sequence[int]:
        """For each slice, the position in the row that has position 0 with `reset_positions`."""
        return self.ends

    @property
    def padding(self) -> int:
        """Number of padding tokens, at the end of the row."""
        return self.ends[-1] - self.ends[len(self.slices)]


@dataclass(frozen=True)
class Waste:
    """Cost of a packing in one epoch.

    Args:
        rows: number of rows of N tokens.
        padding: fraction of the rows' tokens that are padding.
        dropped: fraction of the documents' tokens that are in no row.
        cut: fraction of the documents that are cut over several rows or incomplete.
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
        ValueError: a store without tokens.
    """

    def __init__(self, store: TokenStore, length: int, packing: Packing, key: str) -> None:
        self._store, self._length, self._packing, self._key = store, length, packing, key
        self._documents, self._sizes = self._items()
        if not len(self._documents):
            raise ValueError(f"{store.name} has no tokens; give a store with at least one document")
        # Two epochs: at the end of an epoch the prefetching thread already reads rows of the next one.
        self._packed = lru_cache(maxsize=2)(self._pack)
        self._lock = Lock()
        self.rows = len(self._epoch(0)[0])
        """Rows of each epoch."""

    def _items(self) -> tuple[Index, Index]:
        """Returns the document and the number of tokens of each item to pack: int64 [M] each."""
        documents = np.flatnonzero(self._store.lengths)
        return documents, self._store.lengths[documents]

    def row(self, number: int) -> PackedRow:
        """Returns row `number`, counted from 0 over all epochs."""
        epoch, index = divmod(number, self.rows)
        packed_rows, order = self._epoch(epoch)
        return self._row_of(packed_rows.row(int(order[index])))

    def _row_of(self, slices: Sequence[DocumentSlice]) -> PackedRow:
        """Returns the row of some slices of items; their `document` is an index into `_items`."""
        slices = [
            DocumentSlice(int(self._documents[item_slice.document]), item_slice.start, item_slice.length)
            for item_slice in slices
        ]
        ends = tuple(accumulate((item_slice.length for item_slice in slices), initial=0))
        return PackedRow(self._store, slices, ends if ends[-1] == self._length else (*ends, self._length))

    def waste(self) -> Waste:
        """Returns the cost of the packing in the first epoch."""
        packed_rows, sizes = self._epoch(0)[0], self._sizes
        packed_tokens = int(packed_rows.lengths.sum())
        uncut = int((packed_rows.lengths == sizes[packed_rows.documents]).sum())
        padding = 1 - packed_tokens / (len(packed_rows) * self._length)
        return Waste(len(packed_rows), padding, 1 - packed_tokens / int(sizes.sum()), 1 - uncut / len(sizes))

    def _epoch(self, number: int) -> tuple[Packed, Index]:
        """Returns the rows of an epoch and the order in which they are read."""
        with self._lock:  # a second thread waits, instead of packing the same epoch again
            return self._packed(number)

    def _pack(self, epoch: int) -> tuple[Packed, Index]:
        key = f"{self._key}, epoch {epoch}"
        packed_rows = self._packing(self._sizes, self._length, f"documents of {key}")
        # `row` derives the epoch from the number of a row, so every epoch must have the same number of rows.
        if epoch and len(packed_rows) != self.rows:
            raise ValueError(f"the packing made {len(packed_rows)} rows of epoch {epoch}, but {self.rows} of epoch 0")
        # Tokens of each row. A packing may be a user's function, so its rows are checked.
        sizes = np.diff(np.concatenate([[0], np.cumsum(packed_rows.lengths)])[packed_rows.first])
        if sizes.min() < 1 or sizes.max() > self._length:
            row = int(np.argmax((sizes < 1) | (sizes > self._length)))
            raise ValueError(f"the packing put {sizes[row]} tokens into row {row}, not 1 to {self._length}")
        return packed_rows, permutation(len(packed_rows), f"rows of {key}")


def read_shard(row: PackedRow, spans: Spans, tokens: Index, labels: Index, starts: Index | None = None) -> None:
    """Reads the tokens and labels at the positions `spans` of a row into int64 [T] arrays.

    A label is the next token of the same document, or `IGNORE`. Padding tokens are the end of document, or 0 if the
    store does not record it.

    Args:
        starts: if given, filled with the position in the row that has position 0 with `reset_positions`, for each
            token.
    """
    # Only tokens of the shard are read: slice by slice, in local order.
    offset, origins = 0, row.origins
    for span in spans:
        for number, positions in _cut_at(span, row.ends):
            target = slice(offset, offset + len(positions))
            offset = target.stop
            if starts is not None:
                starts[target] = origins[number]
            if number < len(row.slices):
                _read_slice(row, number, positions, tokens[target], labels[target])
            else:  # padding
                tokens[target], labels[target] = row.store.vocabulary.end_of_document or 0, IGNORE


def _read_slice(row: PackedRow, number: int, positions: range, tokens: Index, labels: Index) -> None:
    """Reads the tokens and labels at some row positions, all in slice `number`."""
    source, store = row.slices[number], row.store
    shift = source.start - row.ends[number]  # from positions in the row to token indices in the document
    start, stop = positions.start + shift, positions[-1] + 1 + shift
    size = int(store.stops[source.document] - store.starts[source.document])
    label_stop = min(stop + 1, size)  # the last token of a document has no label
    if positions.step == 1:
        window = store.read(source.document, start, label_stop)  # one read serves tokens and labels
        tokens[:], next_tokens = window[: len(positions)], window[1:]
    else:
        tokens[:] = store.read(source.document, start, stop, positions.step)
        # With a step, tokens and labels do not overlap: the labels are read separately.
        next_tokens = store.read(source.document, start + 1, label_stop, positions.step)
    labels[: len(next_tokens)], labels[len(next_tokens) :] = next_tokens, IGNORE


def _cut_at(span: range, ends: tuple[int, ...]) -> list[tuple[int, range]]:
    """Cuts a span at the boundaries of a row's slices. Returns (slice, positions) for each piece."""
    pieces: list[tuple[int, range]] = []
    while span:
        number = bisect_right(ends, span[0]) - 1
        # Positions of the span before the slice ends, rounded up because span[0] counts too.
        count = -(-(ends[number + 1] - span[0]) // span.step)
        pieces.append((number, span[:count]))
        span = span[count:]
    return pieces
