"""Which pieces of which documents make up each row of N tokens.

A packing is a function from the documents' lengths to `Packed`. Best-fit packing is that of Ding et al., "Fewer
Truncations Improve Language Modeling" (arXiv 2404.10830).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
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
    """The rows of an epoch. PackedRow r is made of pieces `first[r]` to `first[r + 1] - 1`, in that order.

    Args:
        documents, starts, lengths: int64 [M], the pieces.
        first: int64 [R + 1].
    """

    documents: Index
    starts: Index
    lengths: Index
    first: Index

    def __len__(self) -> int:
        """Rows, R."""
        return len(self.first) - 1

    def row(self, number: int) -> list[DocumentSlice]:
        part = slice(int(self.first[number]), int(self.first[number + 1]))
        columns = (column[part].tolist() for column in (self.documents, self.starts, self.lengths))
        return [DocumentSlice(*piece) for piece in zip(*columns, strict=True)]


Packing = Callable[[Index, int, str], Packed]
"""(lengths of documents [D], tokens of a row N, key of the shuffle) -> rows.

As many rows for every key, and no piece longer than a row. A piece that its document goes on after ends its row."""


def one_per_row(lengths: Index, length: int, key: str) -> Packed:
    """Each document in a row of its own, cut off after N tokens. The rest of a longer document is left out."""
    order = permutation(len(lengths), key)
    return Packed(order, np.zeros_like(order), np.minimum(lengths[order], length), np.arange(len(order) + 1))


def greedy(lengths: Index, length: int, key: str) -> Packed:
    """Documents one after the other; one that the end of a row cuts goes on in the next.

    Only the last row is short."""
    order = permutation(len(lengths), key)
    ends = np.cumsum(lengths[order])
    total = int(ends[-1])
    stops = np.sort(np.concatenate([ends, np.arange(length, total, length)]), kind="stable")  # merges two runs
    stops = stops[np.diff(stops, prepend=0) > 0]
    begins = np.concatenate([[0], stops[:-1]])
    place = np.searchsorted(ends, begins, "right")
    starts = begins - (ends[place] - lengths[order[place]])
    first = np.searchsorted(begins, np.arange(0, total + length, length))
    return Packed(order[place], starts, stops - begins, first)


def best_fit(lengths: Index, length: int, key: str) -> Packed:
    """No document is cut that a row can hold; rows are short instead, by as little as possible.

    Longer documents are cut every N tokens. Pieces, the longest first, go each into the row with the least room that
    still holds it. Which of the documents of one length goes where is up to the shuffle.
    """
    order = permutation(len(lengths), key)
    cuts = -(-lengths[order] // length)
    documents = np.repeat(order, cuts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * length
    sizes = np.minimum(lengths[documents] - starts, length)
    rows = best_fit_rows(sizes, length)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return Packed(documents[order], starts[order], sizes[order], first)


def best_fit_rows(sizes: Index, room: int) -> Index:
    """The row of each piece [M]: best fit of sizes 1..room in decreasing order.

    Pieces of one size are placed together, so this takes about as many steps as there are sizes.
    """
    rows, free, used = np.empty(len(sizes), np.int64), Free(), 0
    for pieces, size in _by_size(sizes):
        while len(pieces):
            space = free.least(size)
            each = (space or room) // size
            wanted = -(-len(pieces) // each)
            if space is None:
                chosen, used = list(range(used, used + wanted)), used + wanted
            else:
                chosen = free.take(space, wanted)
            placed, pieces = pieces[: each * len(chosen)], pieces[each * len(chosen) :]
            rows[placed] = np.repeat(chosen, each)[: len(placed)]
            in_last = len(placed) - each * (len(chosen) - 1)
            free.put((space or room) - each * size, chosen[:-1])
            free.put((space or room) - in_last * size, chosen[-1:])
    return rows


class Free:
    """Rows by the tokens that they have room for."""

    def __init__(self) -> None:
        self._spaces: list[int] = []  # the different ones, rising
        self._rows: dict[int, list[int]] = {}

    def least(self, size: int) -> int | None:
        """The least space of a row that is at least `size`, if there is one."""
        i = bisect_left(self._spaces, size)
        return self._spaces[i] if i < len(self._spaces) else None

    def take(self, space: int, most: int) -> list[int]:
        """Up to `most` of the rows with that space, which are no longer free then."""
        rows = self._rows[space]
        taken = rows[-most:]
        del rows[-most:]
        if not rows:
            del self._rows[space], self._spaces[bisect_left(self._spaces, space)]
        return taken

    def put(self, space: int, rows: list[int]) -> None:
        if space and rows:
            if space not in self._rows:
                insort(self._spaces, space)
            self._rows.setdefault(space, []).extend(rows)


def _by_size(sizes: Index) -> Iterator[tuple[Index, int]]:
    """The pieces of each size, in their order, the largest size first."""
    order = np.argsort(-sizes, kind="stable")
    values, firsts = np.unique(-sizes[order], return_index=True)
    ends = [*firsts[1:].tolist(), len(order)]
    for value, first, end in zip(values.tolist(), firsts.tolist(), ends, strict=True):
        yield order[first:end], -value
