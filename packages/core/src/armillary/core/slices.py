"""Masks as slices, which attention and balancing compute with, and as segments, which layers with a state follow.

A slice is a row q0, q1, k0, k1, low, high of an int64 array [n, 6]: the query at i in q0..q1 - 1 sees the key at j in
k0..k1 - 1 iff low <= j - i <= high, with -FAR and FAR for unbounded sides. The slices of a mask are disjoint, so the
pairs of a mask are the sum of its slices' pairs, and attention merges over its slices.

Segments are the packed documents of a row, or the branches of a prefix tree. Layers with a state (convolutions, linear
attention) and token shifts run along the paths of a tree, from a root to each leaf. Inside a segment the token before
position i is i - 1. Before the first token of a segment comes the last token of its parent segment; a document, or a
root of a tree, has no parent and no token before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from armillary.core.argument_checks import Window, check_bool, document_rows, window_of

FAR = 2**62
"""Larger than the distance of any two positions."""

Integers = NDArray[np.int64]
Slices = NDArray[np.int64]


class Sliced(Protocol):
    """An attention mask: anything that has slices."""

    def slices(self, length: int) -> Sequence[Slices]:
        """Returns the slices for `length` tokens: one array per batch row, or a single one for all rows."""
        ...


def slice_array(slices: Iterable[Sequence[int | None]]) -> Slices:
    # None for `low` or `high` is an unbounded side.
    rows = [(*corners, -FAR if low is None else low, FAR if high is None else high) for *corners, low, high in slices]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def document_slices(ends: Sequence[int], low: int | None = None, high: int | None = None) -> Slices:
    """Returns one slice for each document, between rising `ends`. Tokens see each other if low <= j - i <= high."""
    bounds = np.asarray(ends, dtype=np.int64)
    slices = np.empty((len(bounds) - 1, 6), dtype=np.int64)
    slices[:, 0] = slices[:, 2] = bounds[:-1]
    slices[:, 1] = slices[:, 3] = bounds[1:]
    return within_band(slices, low, high, has_bands=False)


def within_band(slices: Slices, low: int | None, high: int | None, has_bands: bool = True) -> Slices:
    """Returns the slices cut to low <= j - i <= high. Without `has_bands`, columns 4 and 5 are not initialized yet."""
    if has_bands and low is None and high is None:
        return slices
    banded = slices.copy()
    banded[:, 4] = np.maximum(slices[:, 4] if has_bands else -FAR, -FAR if low is None else low)
    banded[:, 5] = np.minimum(slices[:, 5] if has_bands else FAR, FAR if high is None else high)
    return banded


def mask_slices(
    length: int,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> list[Slices]:
    """Returns the slices of this mask: one array for each row of `documents`, or a single one for all batch rows.

    Raises:
        ValueError: documents that fall or are not from 0 to `length`, an invalid window, or `causal` is not a bool.
    """
    low, high = band(check_bool("causal", causal), window_of(window))
    return [document_slices(row, low, high) for row in document_rows(documents, length)]


def band(causal: bool, window: Window | None) -> Window:
    """Returns the smallest and the largest j - i at which the query at i sees the key at j; None if unbounded."""
    left_width, right_width = window or (None, None)
    if causal:
        right_width = 0 if right_width is None else min(right_width, 0)
    return None if left_width is None else -left_width, right_width


def widen(counts: Integers, rows: int, columns: int) -> Integers:
    """Returns the counts in a dtype that can represent `rows * columns`: int64, or beyond that Python's integers."""
    return counts.astype(object) if rows * columns > FAR else counts


def mirror(slices: Slices) -> Slices:
    # low <= j - i <= high is -high <= i - j <= -low.
    transposed_slices = slices[:, [2, 3, 0, 1, 5, 4]]
    transposed_slices[:, 4:] *= -1
    return transposed_slices


def trim(slices: Slices) -> Slices:
    """Returns slices of the same pairs, without empty ones, whose queries all see a key and whose keys are all seen."""
    q0, q1, k0, k1, low, high = slices.T
    # First drop queries whose band has no key, then keys that none of the remaining queries sees.
    q0, q1 = np.maximum(q0, k0 - high), np.minimum(q1, k1 - low)
    k0, k1 = np.maximum(k0, q0 + low), np.minimum(k1, q1 + high)
    trimmed_slices = np.stack((q0, q1, k0, k1, low, high), axis=1)
    return trimmed_slices[(q0 < q1) & (k0 < k1) & (low <= high)]


@dataclass(frozen=True)
class KeyCounts:
    """The number of keys that each query sees, as a piecewise linear function of the query's position.

    Args:
        starts: positions where a new piece begins, rising: [n]. Piece 0 is before the first.
        slopes, constants: in piece p the query at i sees slopes[p] * i + constants[p] keys: [n + 1].
        sums: corrections for `before`: [n + 1]. To count the pairs of queries 0..i - 1, it adds the keys of piece p
            over all positions 0..i - 1, as if piece p began at 0. That is sums[p] too many.
    """

    starts: Integers
    slopes: Integers
    constants: Integers
    sums: Integers

    @classmethod
    def of(cls, slices: Slices) -> KeyCounts:
        """Returns the counts of a mask, added over its slices."""
        # In a slice the query at i sees the keys max(k0, i + low) to min(k1 - 1, i + high). So the number of keys is a
        # difference of two bounds, and each bound is linear in i with one bend.
        slices = trim(slices)
        last_query, last_key = int(slices[:, 1].max(initial=0)), int(slices[:, 3].max(initial=0))
        q0, q1, k0, k1, low, high = widen(slices, last_query, last_key).T
        # The upper bound rises with i until `until`, the lower bound from `since` on; both are constant elsewhere.
        until, since = np.clip(k1 - 1 - high, q0, q1), np.clip(k0 - low, q0, q1)
        # Each slice changes the total number of keys at four positions:
        #   at q0      by upper - lower + 1 = (i + high) - k0 + 1
        #   at until   the upper bound becomes k1 - 1: by (k1 - 1) - (i + high)
        #   at since   the lower bound becomes i + low: by k0 - (i + low)
        #   at q1      back to 0: by (i + low) - k1
        ones = np.ones_like(q0)
        starts = np.concatenate((q0, until, since, q1))
        slopes = np.concatenate((ones, -ones, -ones, ones))
        # For an unbounded side, `until` is q0 or `since` is q1: both terms with FAR are at one position, and cancel.
        # Intermediate sums may wrap around modulo 2^64; results that fit into 64 bits are exact.
        constants = np.concatenate((high - k0 + 1, k1 - 1 - high, k0 - low, low - k1))
        order = np.argsort(starts, kind="stable")
        starts, slopes, constants = starts[order], slopes[order], constants[order]
        sums = slopes * (starts * (starts - 1) // 2) + constants * starts
        none = np.zeros(1, dtype=np.int64)  # piece 0: no pairs before the first start
        return cls(starts, *(np.concatenate((none, x.cumsum())) for x in (slopes, constants, sums)))

    def before(self, positions: Integers) -> Integers:
        piece = np.searchsorted(self.starts, positions, side="right")
        positions = positions.astype(self.sums.dtype)
        triangle = positions * (positions - 1) // 2  # the sum of 0..position - 1
        return self.slopes[piece] * triangle + self.constants[piece] * positions - self.sums[piece]


def count_pairs(slices: Slices) -> int:
    return int(KeyCounts.of(slices).before(slices[:, 1].max(initial=0, keepdims=True))[0])


# -- segments ---------------------------------------------------------------------------------------------------------

MISSING = -1
"""Index of a position or segment that does not exist, such as the parent of a document."""


@dataclass(frozen=True)
class Segments:
    """The segments of one row. Immutable and hashable.

    Args:
        ends: boundaries of the segments: 0, end of the first, ..., N.
        parents: index of each segment's parent, which is an earlier segment; -1 for documents and roots.
    """

    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def documents(cls, ends: Sequence[int]) -> Segments:
        """Returns the segments of packed documents with these boundaries."""
        return cls(tuple(ends), (MISSING,) * (len(ends) - 1))

    @cached_property
    def branching(self) -> bool:
        """True for a tree, in which a token may have several successors."""
        return any(parent != MISSING for parent in self.parents)

    @cached_property
    def _arrays(self) -> tuple[Integers, Integers]:
        return np.array(self.ends, dtype=np.int64), np.array(self.parents, dtype=np.int64)

    def ancestors(self, positions: Integers, distance: int) -> Integers:
        """Returns the position `distance` tokens before each of `positions` on its path; -1 if the path is too short.

        A negative distance looks ahead, within the segment only: after its end several segments may follow.
        """
        ends, parents = self._arrays
        segment = np.searchsorted(ends, positions, side="right") - 1
        if distance < 0:
            later = positions - distance
            return np.where(later < ends[segment + 1], later, MISSING)
        position, steps_left = positions.copy(), np.full_like(positions, distance)
        # Climb the tree, all positions at once. A position whose ancestor is not in its segment moves to the last token
        # of the parent segment, or to -1 if there is no parent. There is one iteration per generation between a token
        # and its ancestor.
        while (climbing := np.flatnonzero((steps_left > position - ends[segment]) & (position != MISSING))).size:
            parent = parents[segment[climbing]]
            steps_left[climbing] -= position[climbing] - ends[segment[climbing]] + 1  # to the end of the parent
            position[climbing] = np.where(parent == MISSING, MISSING, ends[parent + 1] - 1)
            segment[climbing] = parent
            steps_left[climbing[parent == MISSING]] = 0
        return np.where(position == MISSING, MISSING, position - steps_left)

    @cached_property
    def last_descendants(self) -> list[int]:
        """Index of each segment's last descendant, or of the segment itself. Segments must be in depth-first order."""
        last = list(range(len(self.parents)))
        # Backwards, because all descendants of a segment come after it.
        for segment in range(len(last) - 1, 0, -1):
            if (parent := self.parents[segment]) != MISSING:
                last[parent] = max(last[parent], last[segment])
        return last

    def slices(self, length: int) -> list[Slices]:
        """Returns the slices of the mask in which a token sees its path, up to itself. Needs depth-first order."""
        # Each segment has one slice: the keys are its tokens, the queries its tokens and those of all descendants.
        # Segments that follow each other as only children share one slice.
        (ends, parents), child_counts = self._arrays, np.zeros(len(self.parents), dtype=np.int64)
        np.add.at(child_counts, parents[parents != MISSING], 1)
        only_child = (parents != MISSING) & (parents == np.arange(-1, len(parents) - 1)) & (child_counts[parents] == 1)
        # A chain is a segment and the only children after it: indices of the first and the last segment of each chain.
        first = np.flatnonzero(~only_child)
        last = np.append(first[1:], len(parents)) - 1
        # In depth-first order the descendants of a segment follow it without a gap, so its queries are one range.
        slices = np.empty((len(first), 6), dtype=np.int64)
        slices[:, 0] = slices[:, 2] = ends[first]
        slices[:, 1], slices[:, 3] = ends[np.array(self.last_descendants)[last] + 1], ends[last + 1]
        slices[:, 4], slices[:, 5] = -FAR, 0  # causal: j - i <= 0
        return [slices]

    def runs(self, spans: Iterable[range]) -> list[range]:
        """Returns a shard's runs, in local order: its spans cut at the ends of segments, striped ones into tokens."""
        (ends, _), runs = self._arrays, list[range]()
        for span in spans:
            if span.step > 1:
                runs += [range(token, token + 1) for token in span]
                continue
            inner = ends[np.searchsorted(ends, span.start, "right") : np.searchsorted(ends, span.stop, "left")].tolist()
            runs += [range(a, b) for a, b in pairwise((span.start, *inner, span.stop))]
        return runs


def path_depths(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns the number of tokens before each segment on its path, from parents and lengths of segments."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == MISSING else depths[parent] + lengths[parent])
    return depths


def misplaced_segment(parents: Sequence[int]) -> int | None:
    """Returns the first segment that violates depth-first order; None if no segment does."""
    # The parent of a segment must be the segment before it, an ancestor of that segment, or -1.
    path: list[int] = []  # the previous segment and its ancestors, from the root: the next parent must be one of these
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != MISSING and not path:
            return segment
        path.append(segment)
    return None


class Segmented(Protocol):
    """An attention mask whose rows are segments: packed documents or a tree."""

    def segments(self, length: int) -> Sequence[Segments]:
        """Returns the segments of each batch row, or a single entry that holds for all rows."""
        ...


def check_lookahead(name: str, distance: int, rows: Sequence[Segments]) -> None:
    if distance < 0 and any(row.branching for row in rows):
        raise ValueError(
            f"{name} asks for {-distance} tokens ahead in a tree, where a token may have several successors"
        )


def segments_of(length: int, documents: object = None, mask: Segmented | None = None) -> tuple[Segments, ...]:
    """Returns the segments of each batch row, or a single entry that holds for all rows.

    Raises:
        ValueError: both documents and a mask, boundaries that fall or are not from 0 to `length`, or a mask that has no
            segments.
    """
    if mask is not None:
        if documents is not None:
            raise ValueError(f"documents={documents!r} beside mask={mask!r}: pass one of them")
        if not hasattr(mask, "segments"):
            raise ValueError(f"mask is a {type(mask).__name__}; an attention mask of documents or a tree is accepted")
        return tuple(mask.segments(length))
    return tuple(Segments.documents(row) for row in document_rows(documents, length))
