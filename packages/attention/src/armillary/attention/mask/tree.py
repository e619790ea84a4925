"""Sequences with shared beginnings, packed as a tree: one prompt with several answers, and answers to those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.segments import Segments, misplaced_segment, path_depths
from armillary.core.slices import FAR, Integers, Slices
from armillary.core.validation import Window, boundaries_of, integer


class Tree(RowPattern):
    """Segments in depth-first order. A token sees its own segment causally, and the segments of its ancestors.

    Args:
        ends: boundaries of segments, 0, end of the first, ..., N.
        parents: the parent of each segment: the segment before it, an ancestor of that one, or -1 for a root.

    Raises:
        ValueError: boundaries that do not rise from 0; another number of parents, or one that is not on the path to
            the segment before.
    """

    code = 2
    says_causal = True

    def __init__(self, ends: Sequence[int], parents: Sequence[int]) -> None:
        self.ends = boundaries_of(_integers_of(ends))
        self.parents = tuple(integer("parent", parent) for parent in _integers_of(parents))
        self._check_parents()

    def _check_parents(self) -> None:
        if len(self.parents) != len(self.ends) - 1:
            raise ValueError(f"{len(self.parents)} parents for {len(self.ends) - 1} segments; each needs one, or -1")
        if (segment := misplaced_segment(self.parents)) is not None:
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
        return None, None  # a window counts tokens along the path, not positions

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        if window is None or window[0] is None:
            return self.segments.slices(queries)[0]
        return np.array(list(self._window_slices(window[0])), dtype=np.int64)

    def _window_slices(self, tokens: int) -> Iterator[tuple[int, ...]]:
        """Yields a band for each segment and each ancestor that a window of `tokens` tokens along the path reaches."""
        shifts = self._shifts
        for segment, parent in enumerate(self.parents):
            start, stop = self.ends[segment : segment + 2]
            yield start, stop, start, stop, -tokens, 0
            while parent >= 0:
                k0, k1 = self.ends[parent : parent + 2]
                # depth(i) - depth(j) <= tokens, with depth = position + shift: the smallest visible j - i.
                low = shifts[segment] - shifts[parent] - tokens
                # The window of the first query has no key of this ancestor, so it reaches no ancestor further up.
                if k1 - 1 - start < low:
                    break
                yield start, stop, k0, k1, low, FAR
                parent = self.parents[parent]

    @cached_property
    def _shifts(self) -> list[int]:
        """Depth along the path minus position, for the tokens of each segment; at most 0."""
        lengths = [b - a for a, b in pairwise(self.ends)]
        return [depth - start for depth, start in zip(path_depths(self.parents, lengths), self.ends, strict=False)]

    def positions(self, ends: Ends, length: int) -> Integers:
        return np.arange(length) + np.repeat(np.array(self._shifts), np.diff(np.array(self.ends)))


def _integers_of(values: Sequence[int]) -> Sequence[int]:
    """Returns the integers of a sequence, an array or a tensor."""
    tolist = getattr(values, "tolist", None)
    return tolist() if tolist is not None else tuple(values) if isinstance(values, range) else values
