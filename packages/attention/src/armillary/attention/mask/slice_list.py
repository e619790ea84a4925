"""Any mask, as a list of disjoint slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.parts import FAR, Integers, Slices, Window, integer, slice_array, trim

MAX_COMPARED_PAIRS = 2**20
"""Maximum number of pairs of slices that are compared at once, which bounds the memory."""


class Slice(NamedTuple):
    """The query at i in `queries` sees the key at j in `keys` iff low <= j - i <= high; None is unbounded."""

    queries: range
    keys: range
    low: int | None = None
    high: int | None = None


class SliceList(RowPattern):
    """A list of disjoint slices: no (query, key) pair is in two of them.

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
    """Raises ValueError for two slices that share a (query, key) pair. The message names both slices and the pair."""
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
    """Sorts slices by their start in queries (column 0) or keys (column 2), and counts overlaps.

    Returns:
        The indices of the slices in sorted order, and for each sorted slice the number of following slices that start
        before it ends.
    """
    order = np.argsort(slices[:, column], kind="stable")
    starts, stops = slices[order, column], slices[order, column + 1]
    return order, np.searchsorted(starts, stops) - np.arange(1, len(order) + 1)


def _check_pairs(slices: Slices, start: int, ends: Integers) -> None:
    """Raises ValueError if a slice, from index `start` on, shares a (query, key) pair with a slice that follows it.

    Args:
        slices: sorted slices.
        ends: cumulative number of the following slices to which each slice is compared, from slice `start` on.
    """
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
