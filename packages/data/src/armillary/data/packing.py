"""Packing: the slices of documents that make up rows of N tokens.

A packing is a function from the lengths of documents to `Packed`. Best-fit packing follows Ding et al., "Fewer
Truncations Improve Language Modeling" (arXiv 2404.10830).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from armillary.data.shuffle import Index, permutation


@dataclass(frozen=True)
class DocumentSlice:
    """Tokens `start` to `start + length - 1` of a document."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of an epoch. Row r consists of slices `first[r]` to `first[r + 1] - 1`, in that order.

    Args:
        documents, starts, lengths: int64 [M], the slices.
        first: int64 [R + 1].
    """

    documents: Index
    starts: Index
    lengths: Index
    first: Index

    def __len__(self) -> int:
        """Number of rows, R."""
        return len(self.first) - 1

    def row(self, number: int) -> list[DocumentSlice]:
        window = slice(int(self.first[number]), int(self.first[number + 1]))
        columns = (column[window].tolist() for column in (self.documents, self.starts, self.lengths))
        return [DocumentSlice(*values) for values in zip(*columns, strict=True)]


Packing = Callable[[Index, int, str], Packed]
"""(lengths of documents [D], tokens of a row N, key of the shuffle) -> rows.

The number of rows must not depend on the key, and no slice may be longer than a row. A slice that ends before its
document does must be the last of its row."""


def one_per_row(lengths: Index, length: int, key: str) -> Packed:
    """Puts each document into a row of its own, and drops its tokens after the first N."""
    order = permutation(len(lengths), key)
    return Packed(order, np.zeros_like(order), np.minimum(lengths[order], length), np.arange(len(order) + 1))


def greedy(lengths: Index, length: int, key: str) -> Packed:
    """Concatenates documents and cuts every N tokens; only the last row is short."""
    order = permutation(len(lengths), key)
    ends = np.cumsum(lengths[order])
    total = int(ends[-1])
    # A slice ends where a document or a row does. The stable sort merges two sorted runs.
    stops = np.sort(np.concatenate([ends, np.arange(length, total, length)]), kind="stable")
    stops = stops[np.diff(stops, prepend=0) > 0]
    begins = np.concatenate([[0], stops[:-1]])
    # The document of each slice, and the slice's start within it.
    index = np.searchsorted(ends, begins, "right")
    starts = begins - (ends[index] - lengths[order[index]])
    # The first slice of each row: rows begin at multiples of N in the concatenation.
    first = np.searchsorted(begins, np.arange(0, total + length, length))
    return Packed(order[index], starts, stops - begins, first)


def best_fit(lengths: Index, length: int, key: str) -> Packed:
    """Cuts no document that fits into a row; rows are padded instead, as little as possible.

    Longer documents are cut every N tokens. Slices, in order of decreasing length, go into the row with the least room
    that suffices. The shuffle decides among documents of equal length.
    """
    order = permutation(len(lengths), key)
    # 1. Documents longer than a row become slices of N tokens and a remainder.
    cuts = -(-lengths[order] // length)
    documents = np.repeat(order, cuts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * length
    sizes = np.minimum(lengths[documents] - starts, length)
    # 2. Every slice gets a row; then slices are sorted by row.
    rows = best_fit_rows(sizes, length)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return Packed(documents[order], starts[order], sizes[order], first)


def best_fit_rows(sizes: Index, row_size: int) -> Index:
    """Returns the row of each item [M]: best fit of sizes 1..row_size in decreasing order.

    Items of equal size are placed together, so the number of steps is about the number of different sizes.
    """
    rows, free, row_count = np.empty(len(sizes), np.int64), FreeRows(), 0
    order = np.argsort(-sizes, kind="stable")
    negative_sizes, firsts = np.unique(-sizes[order], return_index=True)
    for size, items in zip((-negative_sizes).tolist(), np.split(order, firsts[1:]), strict=True):
        while len(items):
            room = free.smallest_room(size)  # of the fullest rows that have room for an item; None: no row has
            # Each chosen row takes as many items of this size as fit, as best fit would one item at a time.
            per_row = (room or row_size) // size
            row_need = -(-len(items) // per_row)
            if room is None:
                chosen_rows, row_count = list(range(row_count, row_count + row_need)), row_count + row_need
            else:
                chosen_rows = free.take(room, row_need)  # may be fewer than needed: the loop continues
            placed_items, items = items[: per_row * len(chosen_rows)], items[per_row * len(chosen_rows) :]
            rows[placed_items] = np.repeat(chosen_rows, per_row)[: len(placed_items)]
            in_last = len(placed_items) - per_row * (len(chosen_rows) - 1)  # the last row may get fewer
            free.put((room or row_size) - per_row * size, chosen_rows[:-1])
            free.put((room or row_size) - in_last * size, chosen_rows[-1:])
    return rows


class FreeRows:
    """Rows that have room, by the number of free tokens."""

    def __init__(self) -> None:
        self._spaces: list[int] = []  # keys of _rows, sorted
        self._rows: dict[int, list[int]] = {}

    def smallest_room(self, size: int) -> int | None:
        """Returns the smallest room of at least `size`, or None."""
        i = bisect_left(self._spaces, size)
        return self._spaces[i] if i < len(self._spaces) else None

    def take(self, room: int, count: int) -> list[int]:
        """Removes and returns up to `count` rows with exactly this room."""
        rows = self._rows[room]
        chosen_rows = rows[-count:]
        del rows[-count:]
        if not rows:
            del self._rows[room], self._spaces[bisect_left(self._spaces, room)]
        return chosen_rows

    def put(self, room: int, rows: list[int]) -> None:
        if room and rows:
            if room not in self._rows:
                insort(self._spaces, room)
            self._rows.setdefault(room, []).extend(rows)


PACKINGS: dict[str, Packing] = {"greedy": greedy, "best_fit": best_fit, "one_per_row": one_per_row}
"""Packings by name."""
