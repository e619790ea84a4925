"""Patterns that are lists: of any disjoint slices, of the segments of a tree, and of the blocks of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from armillary.attention.mask.patterns import Ends, RowPattern, integers
from armillary.core import Segments
from armillary.core.internal import (
    FAR,
    Integers,
    Slices,
    Window,
    boundaries_of,
    integer,
    misplaced_segment,
    path_depths,
    slice_array,
    trim,
)

# -- slices ------------------------------------------------------------------------------------------------------------

MAX_COMPARED_PAIRS = 2**20
"""Maximum number of pairs of slices that are compared at once, which bounds the memory."""


class Slice(NamedTuple):
    """The query at i in `queries` sees the key at j in `keys` iff low <= j - i <= high; None is unbounded."""

    queries: range
    keys: range
    low: int | None = None
    high: int | None = None


class SliceList(RowPattern):
    """A list of disjoint slices.

    Raises:
        ValueError: a value that is not a slice; two slices that share a pair. The message names both and the pair.
    """

    code = 1

    def __init__(self, bands: Iterable[Slice]) -> None:  # `bands`: a slice is a band on a rectangle
        self.bands = tuple(_check_slice(band) for band in bands)
        self._array = slice_array((q.start, q.stop, k.start, k.stop, low, high) for q, k, low, high in self.bands)
        check_disjoint(self._array)

    @cached_property
    def numbers(self) -> Integers:
        return integers(self._array)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> SliceList:
        pattern = cls.__new__(cls)  # these slices have been checked
        pattern._array = np.array(numbers, dtype=np.int64).reshape(-1, 6)
        pattern.bands = tuple(map(_slice_of_row, pattern._array.tolist()))
        return pattern

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        for name, column, length in (("queries", 1, queries), ("keys", 3, keys)):
            if (last := int(self._array[:, column].max(initial=0))) > length:
                raise ValueError(f"slices reach {name} up to {last}; the sequence has {length}")

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        return self._array


def _check_slice(value: Any) -> Slice:
    try:
        queries, keys, low, high = value
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no slice; give Slice(queries, keys, low, high), ranges and a band") from None
    for positions in (queries, keys):
        if not isinstance(positions, range) or positions.step != 1 or positions.start < 0:
            raise ValueError(f"{value!r}: queries and keys of a slice are ranges of step 1, from 0 or above")
    low, high = (b if b is None or type(b) is int else integer("the bound of a slice", b) for b in (low, high))
    return Slice(queries, keys, low, high)


def _slice_of_row(row: Sequence[int]) -> Slice:
    q0, q1, k0, k1, low, high = row
    return Slice(range(q0, q1), range(k0, k1), None if low == -FAR else low, None if high == FAR else high)


def check_disjoint(slices: Slices) -> None:
    """Raises ValueError for two slices that share a (query, key) pair, with both and the pair."""
    slices = trim(slices)
    # Slices can share a pair only if they overlap in queries and in keys. So it is enough to compare the slices that
    # overlap in queries, or those that overlap in keys, whichever are fewer comparisons.
    order, counts = min((_overlaps(slices, column) for column in (0, 2)), key=lambda overlaps: int(overlaps[1].sum()))
    slices, ends = slices[order], np.append(0, counts.cumsum())  # slice n makes comparisons ends[n] .. ends[n + 1] - 1
    # In batches of at most MAX_COMPARED_PAIRS comparisons, but at least those of one slice.
    while len(ends) > 1 and ends[-1] > ends[0]:
        batch = max(1, int(np.searchsorted(ends, ends[0] + MAX_COMPARED_PAIRS, side="right")) - 1)
        _check_pairs(slices, len(counts) - len(ends) + 1, ends[: batch + 1])
        ends = ends[batch:]


def _overlaps(slices: Slices, column: int) -> tuple[Integers, Integers]:
    """Returns the order of slices by their start in queries (column 0) or keys (2), and their numbers of overlaps."""
    # A slice overlaps the following ones that start before it stops.
    order = np.argsort(slices[:, column], kind="stable")
    starts, stops = slices[order, column], slices[order, column + 1]
    return order, np.searchsorted(starts, stops) - np.arange(1, len(order) + 1)


def _check_pairs(slices: Slices, start: int, ends: Integers) -> None:
    """Raises ValueError if one of the sorted slices from index `start` on shares a pair with one that follows it."""
    # `ends` counts, from slice `start` on, the comparisons of all slices so far.
    # Indices of both slices of each comparison: slice n is compared to n + 1, n + 2, ..., n + counts[n].
    counts = np.diff(ends)
    first = start + np.repeat(np.arange(len(counts)), counts)
    second = first + 1 + np.arange(len(first)) - np.repeat(ends[:-1] - ends[0], counts)
    a, b = slices[first], slices[second]
    # The intersection of two slices is a slice: the larger of the starts and low bounds, the smaller of the others.
    low_sides, high_sides = [0, 2, 4], [1, 3, 5]
    intersection = np.empty_like(a)
    intersection[:, low_sides] = np.maximum(a[:, low_sides], b[:, low_sides])
    intersection[:, high_sides] = np.minimum(a[:, high_sides], b[:, high_sides])
    if len(common_pairs := trim(intersection)):  # `trim` drops slices without a pair
        i, _, k0, _, low, _ = common_pairs[0].tolist()
        n = next(n for n in range(len(a)) if len(trim(intersection[n : n + 1])))
        raise ValueError(
            f"{_slice_of_row(a[n].tolist())} and {_slice_of_row(b[n].tolist())} share the pair of query {i} and key "
            f"{max(k0, i + low)}; slices must be disjoint"
        )


# -- trees -------------------------------------------------------------------------------------------------------------


class Tree(RowPattern):
    """Segments in depth-first order. A token sees its segment up to itself, and the segment's ancestors.

    A token's path is the sequence of segments from the root to its own.

    Args:
        ends: boundaries of segments: 0, end of the first, ..., N.
        parents: the parent of each segment s: s - 1, an ancestor of s - 1, or -1 for a root.

    Raises:
        ValueError: boundaries that do not rise from 0; another number of parents than of segments; parents that
            are none of these.
    """

    code = 2
    says_causal = True

    def __init__(self, ends: Sequence[int], parents: Sequence[int]) -> None:
        self.ends = boundaries_of(_integers_of(ends))
        self.parents = tuple(integer("parent", parent) for parent in _integers_of(parents))
        if len(self.parents) != len(self.ends) - 1:
            raise ValueError(f"{len(self.parents)} parents for {len(self.ends) - 1} segments; each needs one, or -1")
        if (segment := misplaced_segment(self.parents)) is not None:
            # For the message: up to three ancestors of the segment before.
            ancestors, ancestor = list[int](), segment - 1
            while ancestor >= 0 and len(ancestors) < 3 and (ancestor := self.parents[ancestor]) >= 0:
                ancestors.insert(0, ancestor)
            raise ValueError(
                f"parent {self.parents[segment]} of segment {segment}: segments are in depth-first order, so it must "
                f"be {segment - 1}, an ancestor of that ({', '.join(map(str, ancestors)) or 'it has none'}), or -1"
            )

    @cached_property
    def numbers(self) -> Integers:
        return integers(self.ends, self.parents)

    @cached_property
    def segments(self) -> Segments:
        return Segments(self.ends, self.parents)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Tree:
        segments = len(numbers) // 2
        return cls(numbers[: segments + 1], numbers[segments + 1 :])

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        if not self.ends[-1] == queries == keys:
            raise ValueError(f"the tree's segments end at {self.ends[-1]}; there are {queries} queries and {keys} keys")

    def bounds(self, causal: bool, window: Window | None) -> Window:
        return None, None  # `slices` applies the window, which counts tokens along the path and not positions

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        if window is None or window[0] is None:
            return self.segments.slices(queries)[0]
        return np.array(list(self._window_slices(window[0])), dtype=np.int64)

    def _window_slices(self, tokens: int) -> Iterator[tuple[int, ...]]:
        """Yields slices (q0, q1, k0, k1, low, high) under a window of `tokens` tokens along the path."""
        shifts = self._shifts
        for segment, parent in enumerate(self.parents):
            start, stop = self.ends[segment : segment + 2]
            # One slice for the segment with itself, and one for each ancestor within the window of its first token.
            yield start, stop, start, stop, -tokens, 0
            while parent >= 0:
                k0, k1 = self.ends[parent : parent + 2]
                # The window is depth(i) - depth(j) <= tokens, where depth = position + shift. So j - i >= low.
                low = shifts[segment] - shifts[parent] - tokens
                # If the segment's first query does not see the ancestor's last key, it sees no ancestor further up, and
                # later queries see even less.
                if k1 - 1 - start < low:
                    break
                yield start, stop, k0, k1, low, FAR
                parent = self.parents[parent]

    @cached_property
    def _shifts(self) -> list[int]:
        """For each segment, depth (tokens along the path) minus position of its tokens, at most 0."""
        lengths = [b - a for a, b in pairwise(self.ends)]
        return [depth - start for depth, start in zip(path_depths(self.parents, lengths), self.ends, strict=False)]

    def positions(self, ends: Ends, length: int) -> Integers:
        return np.arange(length) + np.repeat(np.array(self._shifts), np.diff(np.array(self.ends)))


def _integers_of(values: Sequence[int]) -> Sequence[int]:
    tolist = getattr(values, "tolist", None)
    return tolist() if tolist is not None else tuple(values) if isinstance(values, range) else values


# -- blocks ------------------------------------------------------------------------------------------------------------


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
    """Yields disjoint rectangles (r0, r1, c0, c1) that cover the True cells of the table."""
    # A rectangle is a run of True columns that is the same in consecutive rows: rows r0 .. r1 - 1.
    open_runs = dict[tuple[int, int], int]()  # runs of columns of the row above -> first row with this run
    for row in range(len(table) + 1):  # after the last row, an empty one ends all rectangles
        cells = table[row] if row < len(table) else np.zeros(0, np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], cells, [False])).astype(np.int8)))
        runs = dict.fromkeys((start, stop) for start, stop in edges.reshape(-1, 2).tolist())
        for run in [run for run in open_runs if run not in runs]:  # the rectangle ends above this row
            yield open_runs.pop(run), row, *run
        for run in runs:
            open_runs.setdefault(run, row)
