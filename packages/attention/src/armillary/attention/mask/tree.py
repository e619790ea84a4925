"""Sequences with shared beginnings, packed as a tree: a prompt with several answers, each answer with further ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core import Segments
from armillary.core.parts import FAR, Integers, Slices, Window, boundaries_of, integer, misplaced_segment, path_depths


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
        self._check_parents()

    def _check_parents(self) -> None:
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
        """Yields slices (q0, q1, k0, k1, low, high) under a window of `tokens` tokens along the path.

        There is one for each segment with itself, and one for each ancestor within the window of its first token.
        """
        shifts = self._shifts
        for segment, parent in enumerate(self.parents):
            start, stop = self.ends[segment : segment + 2]
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
        """For each segment, depth minus position of its tokens, at most 0. Depth counts tokens along the path."""
        lengths = [b - a for a, b in pairwise(self.ends)]
        return [depth - start for depth, start in zip(path_depths(self.parents, lengths), self.ends, strict=False)]

    def positions(self, ends: Ends, length: int) -> Integers:
        return np.arange(length) + np.repeat(np.array(self._shifts), np.diff(np.array(self.ends)))


def _integers_of(values: Sequence[int]) -> Sequence[int]:
    """Returns the integers of a sequence, an array or a tensor."""
    tolist = getattr(values, "tolist", None)
    return tolist() if tolist is not None else tuple(values) if isinstance(values, range) else values
