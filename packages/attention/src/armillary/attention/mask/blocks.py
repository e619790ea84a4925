"""Block-sparse masks: a table of the blocks of queries and keys that see each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.parts import FAR, Integers, Slices, Window, integer


class Blocks(RowPattern):
    """Block i of the queries sees block j of the keys if visible[i, j].

    Args:
        visible: bool [n, m], for n blocks of queries and m blocks of keys.
        block: tokens of a block; the last block may have fewer.
        length: number of queries. By default any number that makes n blocks.

    Raises:
        ValueError: a table that is empty or not bool with two dims; a block below 1; a length that does not make n
            blocks.
    """

    code = 6

    def __init__(self, visible: Any, block: int, length: int | None = None) -> None:
        try:
            table = np.asarray(visible)
        except ValueError:  # rows of unequal lengths: the check below raises the error
            table = np.array(visible, dtype=object)
        if table.ndim != 2 or table.dtype != np.bool_ or 0 in table.shape:
            raise ValueError(f"visible has shape {table.shape} and dtype {table.dtype}; bool [n, m] is needed")
        self.visible = tuple(map(tuple, table.tolist()))
        self.block = integer("block", block, minimum=1)
        self.length = None if length is None else integer("length", length, minimum=1)
        self._table = table
        if self.length is not None:
            self._check_count("rows", len(table), self.length)

    @cached_property
    def numbers(self) -> Integers:
        rows, columns = self._table.shape
        return integers((self.block, self.length or 0, rows, columns), self._table)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Blocks:
        block, length, rows, columns, *table = numbers
        return cls(np.array(table, dtype=bool).reshape(rows, columns), block, length or None)

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        if self.length not in (None, queries):
            raise ValueError(f"blocks of a sequence of {self.length} tokens; there are {queries}")
        self._check_count("rows", len(self._table), queries)
        self._check_count("columns", self._table.shape[1], keys)

    def _check_count(self, name: str, count: int, tokens: int) -> None:
        blocks = -(-tokens // self.block)
        if count != blocks:
            raise ValueError(f"visible has {count} {name}; {tokens} tokens in blocks of {self.block} need {blocks}")

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        sorted_rectangles = sorted(rectangles(self._table), key=lambda rectangle: rectangle[1:])
        corners = np.array(sorted_rectangles, dtype=np.int64).reshape(-1, 4) * self.block
        limits = np.array([queries, queries, keys, keys], dtype=np.int64)  # the last block may be shorter
        # A slice is a rectangle with a band; here the band (-FAR, FAR) excludes no pair.
        band = np.full((len(corners), 2), FAR, dtype=np.int64) * np.array([-1, 1])
        return np.concatenate((np.minimum(corners, limits), band), axis=1)


def rectangles(table: NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    """Yields disjoint rectangles (r0, r1, c0, c1) that cover the True cells: rows r0 .. r1 - 1, columns c0 .. c1 - 1.

    A rectangle is a run of True columns that is the same in consecutive rows.
    """
    open_runs = dict[tuple[int, int], int]()  # runs of columns of the row above -> first row with this run
    for row in range(len(table) + 1):  # after the last row, an empty one ends all rectangles
        cells = table[row] if row < len(table) else np.zeros(0, np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], cells, [False])).astype(np.int8)))
        runs = dict.fromkeys((start, stop) for start, stop in edges.reshape(-1, 2).tolist())
        for run in [run for run in open_runs if run not in runs]:  # the rectangle ends above this row
            yield open_runs.pop(run), row, *run
        for run in runs:
            open_runs.setdefault(run, row)
