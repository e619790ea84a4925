"""Packing: chooses the documents, or pieces of documents, that make up each row of N tokens.

A packing is a function from the lengths of documents to `Packed`. Best-fit packing follows Ding et al., "Fewer
Truncations Improve Language Modeling" (arXiv 2404.10830).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from armillary.data.store import Index, random_bits


@dataclass(frozen=True)
class DocumentPiece:
    """Tokens `start` to `start + length - 1` of document number `document`."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Packed:
    """The R rows of an epoch, as M pieces of documents. Row r is pieces `first[r]` to `first[r + 1] - 1`, in order.

    Args:
        documents, starts, lengths: int64 [M]: for each piece its document, its first token in the document and its
            number of tokens.
        first: int64 [R + 1]: number of the first piece of each row, then M.
    """

    documents: Index
    starts: Index
    lengths: Index
    first: Index

    def __len__(self) -> int:
        """Number of rows, R."""
        return len(self.first) - 1

    def row(self, number: int) -> list[DocumentPiece]:
        """Returns the pieces of a row."""
        window = slice(int(self.first[number]), int(self.first[number + 1]))
        columns = (column[window].tolist() for column in (self.documents, self.starts, self.lengths))
        return [DocumentPiece(*values) for values in zip(*columns, strict=True)]


Packing = Callable[[Index, int, str], Packed]
"""(lengths of documents [D], tokens of a row N, key of the shuffle) -> rows.

The number of rows must not depend on the key, and the pieces of a row have at most N tokens together. A piece that ends
before its document ends must be the last piece of its row."""


def permutation(n: int, key: str) -> Index:
    """Returns the integers 0..n-1 in an order that depends on `n` and `key` alone: int64 [n]."""
    return np.argsort(random_bits(key, np.arange(n)), kind="stable")


def one_per_row(lengths: Index, length: int, key: str) -> Packed:
    """Puts each document into a row of its own, and drops its tokens after the first N."""
    order = permutation(len(lengths), key)
    return Packed(order, np.zeros_like(order), np.minimum(lengths[order], length), np.arange(len(order) + 1))


def greedy(lengths: Index, length: int, key: str) -> Packed:
    """Concatenates documents and cuts every N tokens; only the last row can be shorter."""
    order = permutation(len(lengths), key)
    ends = np.cumsum(lengths[order])
    total = int(ends[-1])
    # A piece ends where a document or a row ends. The input is two sorted runs, which a stable sort merges in linear
    # time.
    stops = np.sort(np.concatenate([ends, np.arange(length, total, length)]), kind="stable")
    stops = stops[np.diff(stops, prepend=0) > 0]
    begins = np.concatenate([[0], stops[:-1]])
    # The document of each piece, as an index into `order`, and the first token of the piece within the document.
    index = np.searchsorted(ends, begins, "right")
    starts = begins - (ends[index] - lengths[order[index]])
    # The first piece of each row: rows begin at multiples of N in the concatenation.
    first = np.searchsorted(begins, np.arange(0, total + length, length))
    return Packed(order[index], starts, stops - begins, first)


def best_fit(lengths: Index, length: int, key: str) -> Packed:
    """Cuts no document that fits into a row; rows are padded instead.

    Longer documents are cut every N tokens. Then each piece, from the longest to the shortest, goes into the fullest
    row that has room for it. The shuffle decides the order of pieces of equal length.
    """
    order = permutation(len(lengths), key)
    # 1. Documents longer than a row become pieces of N tokens and a remainder.
    piece_counts = -(-lengths[order] // length)  # rounded up
    documents = np.repeat(order, piece_counts)
    # Piece i of a document starts at its token i N; i counts from the first piece of the document.
    first_pieces = np.repeat(np.cumsum(piece_counts) - piece_counts, piece_counts)
    starts = (np.arange(len(documents)) - first_pieces) * length
    sizes = np.minimum(lengths[documents] - starts, length)
    # 2. Each piece gets a row; then the pieces are sorted by row.
    rows = best_fit_rows(sizes, length)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return Packed(documents[order], starts[order], sizes[order], first)


def best_fit_rows(sizes: Index, row_size: int) -> Index:
    """Returns the row of each item, int64 [M], by best fit: the fullest row that has room for the item."""
    # From the largest item to the smallest. Items of equal size are placed together, so the number of iterations is
    # about the number of different sizes.
    rows, free, row_count = np.empty(len(sizes), np.int64), FreeRows(), 0
    order = np.argsort(-sizes, kind="stable")
    # Groups of items of equal size, the largest size first.
    negative_sizes, firsts = np.unique(-sizes[order], return_index=True)
    for size, items in zip((-negative_sizes).tolist(), np.split(order, firsts[1:]), strict=True):
        while len(items):
            smallest_room = free.smallest_room(size)
            room = smallest_room or row_size  # free tokens of each chosen row; new rows are empty
            # Each chosen row takes as many items as fit. Placing items one by one would give the same rows: of all rows
            # with room for the next item, the row that has just received one is the fullest.
            per_row = room // size
            needed_rows = -(-len(items) // per_row)  # rounded up
            if smallest_room is None:  # no row has room for an item: starts new rows
                chosen_rows, row_count = list(range(row_count, row_count + needed_rows)), row_count + needed_rows
            else:
                chosen_rows = free.take(room, needed_rows)  # may be fewer than needed: the loop continues
            placed_items, items = items[: per_row * len(chosen_rows)], items[per_row * len(chosen_rows) :]
            rows[placed_items] = np.repeat(chosen_rows, per_row)[: len(placed_items)]
            count_in_last = len(placed_items) - per_row * (len(chosen_rows) - 1)  # the last row may get fewer items
            free.put(room - per_row * size, chosen_rows[:-1])
            free.put(room - count_in_last * size, chosen_rows[-1:])
    return rows


class FreeRows:
    """Rows with free tokens, grouped by their number of free tokens, the *room*."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # keys of `_rows`, sorted
        self._rows: dict[int, list[int]] = {}

    def smallest_room(self, size: int) -> int | None:
        """Returns the smallest room of at least `size` tokens that any row has, or None."""
        i = bisect_left(self._rooms, size)
        return self._rooms[i] if i < len(self._rooms) else None

    def take(self, room: int, count: int) -> list[int]:
        """Removes and returns up to `count` rows with exactly this room."""
        rows = self._rows[room]
        chosen_rows = rows[-count:]
        del rows[-count:]
        if not rows:
            del self._rows[room], self._rooms[bisect_left(self._rooms, room)]
        return chosen_rows

    def put(self, room: int, rows: list[int]) -> None:
        if room and rows:  # full rows are not kept
            if room not in self._rows:
                insort(self._rooms, room)
            self._rows.setdefault(room, []).extend(rows)


PACKINGS: dict[str, Packing] = {"greedy": greedy, "best_fit": best_fit, "one_per_row": one_per_row}
"""Packings by name."""
