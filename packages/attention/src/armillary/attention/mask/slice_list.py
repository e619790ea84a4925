"""Slices as they are given: any mask at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.checked import Window, integer
from armillary.core.slices import FAR, Integers, Slices, slice_array, trimmed

PAIRS = 2**20
"""Pairs of slices that are compared at once."""


class Slice(NamedTuple):
    """The query at i in `queries` sees the key at j in `keys` iff low <= j - i <= high; None: not bounded."""

    queries: range
    keys: range
    low: int | None = None
    high: int | None = None


class SliceList(RowPattern):
    """Slices that share no pair.

    Raises:
        ValueError: slices that are none, with the one; slices that share a pair, with both and the pair.
    """

    code = 1

    def __init__(self, given: Iterable[Slice]) -> None:
        self.given = tuple(_checked(each) for each in given)
        self._array = slice_array((q.start, q.stop, k.start, k.stop, low, high) for q, k, low, high in self.given)
        check_disjoint(self._array)

    @cached_property
    def numbers(self) -> Integers:
        return integers(self._array)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> SliceList:
        found = cls.__new__(cls)  # checked before
        found._array = np.array(numbers, dtype=np.int64).reshape(-1, 6)
        found.given = tuple(map(_of_row, found._array.tolist()))
        return found

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        for name, column, length in (("queries", 1, queries), ("keys", 3, keys)):
            if (last := int(self._array[:, column].max(initial=0))) > length:
                raise ValueError(f"slices reach {name} up to {last}; the sequence has {length}")

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        return self._array


def _checked(given: Any) -> Slice:
    try:
        queries, keys, low, high = given
    except (TypeError, ValueError):
        raise ValueError(
            f"{given!r} is no slice; give Slice(queries, keys, low, high), two ranges and a band"
        ) from None
    for its in (queries, keys):
        if not isinstance(its, range) or its.step != 1 or its.start < 0:
            raise ValueError(f"{given!r}: queries and keys of a slice are ranges of step 1, from 0 or above")
    low, high = (b if b is None or type(b) is int else integer("the bound of a slice", b) for b in (low, high))
    return Slice(queries, keys, low, high)


def _of_row(row: Sequence[int]) -> Slice:
    q0, q1, k0, k1, low, high = row
    return Slice(range(q0, q1), range(k0, k1), None if low == -FAR else low, None if high == FAR else high)


def check_disjoint(slices: Slices) -> None:
    """Refuses slices of which two share a pair. Compares those that overlap in queries, or in keys if those are fewer.

    Raises:
        ValueError: with both slices, and the pair.
    """
    found = trimmed(slices)
    order, counts = min((_overlaps(found, column) for column in (0, 2)), key=lambda sweep: int(sweep[1].sum()))
    found, ends = found[order], np.append(0, counts.cumsum())
    while len(ends) > 1 and ends[-1] > ends[0]:
        some = max(1, int(np.searchsorted(ends, ends[0] + PAIRS, side="right")) - 1)
        _check_pairs(found, len(counts) - len(ends) + 1, ends[: some + 1])
        ends = ends[some:]


def _overlaps(slices: Slices, column: int) -> tuple[Integers, Integers]:
    """(order of starts, how many of those that follow begin before each ends), in queries (0) or keys (2)."""
    order = np.argsort(slices[:, column], kind="stable")
    starts, stops = slices[order, column], slices[order, column + 1]
    return order, np.searchsorted(starts, stops) - np.arange(1, len(order) + 1)


def _check_pairs(slices: Slices, start: int, ends: Integers) -> None:
    """Compares slices from `start` on with those that follow and overlap: as many as `ends` rises by."""
    counts = np.diff(ends)
    first = start + np.repeat(np.arange(len(counts)), counts)
    second = first + 1 + np.arange(len(first)) - np.repeat(ends[:-1] - ends[0], counts)
    a, b = slices[first], slices[second]
    low_sides, high_sides = [0, 2, 4], [1, 3, 5]
    both = np.empty_like(a)
    both[:, low_sides] = np.maximum(a[:, low_sides], b[:, low_sides])
    both[:, high_sides] = np.minimum(a[:, high_sides], b[:, high_sides])
    if len(shared := trimmed(both)):
        i, _, k0, _, low, _ = shared[0].tolist()
        n = next(n for n in range(len(both)) if len(trimmed(both[n : n + 1])))
        raise ValueError(
            f"{_of_row(a[n].tolist())} and {_of_row(b[n].tolist())} share the pair of query {i} and key "
            f"{max(k0, i + low)}; slices must be disjoint, so that no pair is counted twice"
        )
