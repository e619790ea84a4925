"""Masks that are said block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.checked import Window, integer
from armillary.core.slices import FAR, Integers, Slices


class Blocks(RowPattern):
    """Blocks of queries see blocks of keys, as a table says.

    Args:
        visible: bool [n, m]: whether the queries of a block see the keys of a block.
        block: tokens of each; the last may have fewer.
        length: of the sequence, where there are other keys of queries and keys; as the call has it unless given.

    Raises:
        ValueError: a table that is not one of bools in two dims; a block below 1; a length of another number of blocks.
    """

    code = 6

    def __init__(self, visible: Any, block: int, length: int | None = None) -> None:
        try:
            table = np.asarray(visible)
        except ValueError:  # rows of unequal lengths
            table = np.array(visible, dtype=object)
        if table.ndim != 2 or table.dtype != np.bool_ or 0 in table.shape:
            raise ValueError(f"visible has shape {table.shape} and dtype {table.dtype}; bool [n, m] is needed")
        self.visible = tuple(map(tuple, table.tolist()))
        self.block = integer("block", block, least=1)
        self.length = None if length is None else integer("length", length, least=1)
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

    def _check_count(self, name: str, found: int, tokens: int) -> None:
        if found != -(-tokens // self.block):
            raise ValueError(
                f"visible has {found} {name}; {tokens} tokens in blocks of {self.block} need {-(-tokens // self.block)}"
            )

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        made = np.array([*self._rectangles()], dtype=np.int64).reshape(-1, 4) * self.block
        limits = np.array([queries, queries, keys, keys], dtype=np.int64)
        bounds = np.full((len(made), 2), FAR, dtype=np.int64) * np.array([-1, 1])
        return np.concatenate((np.minimum(made, limits), bounds), axis=1)

    def _rectangles(self) -> Iterator[tuple[int, int, int, int]]:
        """Runs of visible blocks, those of neighbouring rows that are alike together: r0, r1, c0, c1."""
        open_runs = dict[tuple[int, int], int]()
        for row in range(len(self._table) + 1):
            here = _runs(self._table[row]) if row < len(self._table) else set[tuple[int, int]]()
            for run in sorted(open_runs.keys() - here):
                yield open_runs.pop(run), row, *run
            for run in here - open_runs.keys():
                open_runs[run] = row


def _runs(row: Any) -> set[tuple[int, int]]:
    """Runs of True, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], row, [False])).astype(np.int8)))
    return {(start, stop) for start, stop in edges.reshape(-1, 2).tolist()}
