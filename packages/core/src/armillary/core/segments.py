"""Segments of a row of tokens: packed documents, or the branches of a prefix tree.

Layers with a state (convolutions, linear attention) and token shifts run along paths from a root. The token before
position i is i - 1 inside a segment, and the last token of the parent at the start of a segment. Documents and roots
have no parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from armillary.core.slices import FAR, Integers, Slices
from armillary.core.validation import documents_of

NONE = -1
"""Index of a position or segment that does not exist, such as the parent of a document."""


@dataclass(frozen=True)
class Segments:
    """The segments of one row. Immutable and hashable.

    Args:
        ends: boundaries 0, end of the first segment, ..., N.
        parents: index of each segment's parent, which precedes it; -1 for documents and roots.
    """

    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def documents(cls, ends: Sequence[int]) -> Segments:
        """Returns the segments of packed documents with these boundaries."""
        return cls(tuple(ends), (NONE,) * (len(ends) - 1))

    @cached_property
    def branching(self) -> bool:
        """True for a tree, in which a token may have several successors."""
        return any(parent != NONE for parent in self.parents)

    @cached_property
    def _arrays(self) -> tuple[Integers, Integers]:
        return np.array(self.ends, dtype=np.int64), np.array(self.parents, dtype=np.int64)

    def ancestors(self, positions: Integers, distance: int) -> Integers:
        """Returns the position `distance` tokens before each position along its path, or -1 where the path is shorter.

        Negative distances look ahead within a segment.
        """
        ends, parents = self._arrays
        segment = np.searchsorted(ends, positions, side="right") - 1
        if distance < 0:  # look ahead, which is unique only inside a segment
            later = positions - distance
            return np.where(later < ends[segment + 1], later, NONE)
        position, steps_left = positions.copy(), np.full_like(positions, distance)
        # Climb the tree, all positions at once: those whose ancestor is above their segment step to the last token of
        # the parent segment, or to -1 at a root. There are as many iterations as generations between a token and its
        # ancestor.
        while (climbing := np.flatnonzero((steps_left > position - ends[segment]) & (position != NONE))).size:
            parent = parents[segment[climbing]]
            steps_left[climbing] -= position[climbing] - ends[segment[climbing]] + 1
            position[climbing] = np.where(parent == NONE, NONE, ends[parent + 1] - 1)
            segment[climbing] = parent
            steps_left[climbing[parent == NONE]] = 0
        return np.where(position == NONE, NONE, position - steps_left)

    @cached_property
    def last_descendants(self) -> list[int]:
        """The last descendant of each segment, or the segment itself. Segments are in depth-first order."""
        last = list(range(len(self.parents)))
        # Backwards, so that a segment is complete before it is merged into its parent.
        for segment in range(len(last) - 1, 0, -1):
            if (parent := self.parents[segment]) != NONE:
                last[parent] = max(last[parent], last[segment])
        return last

    def slices(self, length: int) -> list[Slices]:
        """Returns the slices of the mask in which a token sees its path up to itself.

        Segments must be in depth-first order. One slice per segment: its keys are the segment, its queries the
        segment and all of its descendants. A chain of only children shares one slice.
        """
        (ends, parents), child_counts = self._arrays, np.zeros(len(self.parents), dtype=np.int64)
        np.add.at(child_counts, parents[parents != NONE], 1)
        # In depth-first order the descendants of a segment follow it without a gap, so they are one range of queries.
        only_child = (parents != NONE) & (parents == np.arange(-1, len(parents) - 1)) & (child_counts[parents] == 1)
        # The first and the last segment of each chain.
        first = np.flatnonzero(~only_child)
        last = np.append(first[1:], len(parents)) - 1
        slices = np.empty((len(first), 6), dtype=np.int64)
        slices[:, 0] = slices[:, 2] = ends[first]
        slices[:, 1], slices[:, 3] = ends[np.array(self.last_descendants)[last] + 1], ends[last + 1]
        slices[:, 4], slices[:, 5] = -FAR, 0  # causal: j - i <= 0
        return [slices]

    def runs(self, spans: Iterable[range]) -> list[range]:
        """Returns the runs of adjacent tokens of one segment in a shard's spans, in local order."""
        return [run for span in spans for run in self.cut(span)]

    def cut(self, span: range) -> list[range]:
        """Returns the runs of adjacent tokens of one segment in a span; single tokens if its step is above 1."""
        if span.step > 1:
            return [range(token, token + 1) for token in span]
        ends, _ = self._arrays
        inner = ends[np.searchsorted(ends, span.start, "right") : np.searchsorted(ends, span.stop, "left")].tolist()
        return [range(a, b) for a, b in pairwise((span.start, *inner, span.stop))]


def path_depths(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns the number of tokens before each segment on its path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == NONE else depths[parent] + lengths[parent])
    return depths


def misplaced_segment(parents: Sequence[int]) -> int | None:
    """Returns the first segment that is not in depth-first order; None if all are.

    The parent of a segment must be the segment before it, an ancestor of that one, or -1.
    """
    path: list[int] = []  # from the root to the previous segment; the next parent must be one of these
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != NONE and not path:
            return segment
        path.append(segment)
    return None


class Segmented(Protocol):
    """An attention mask whose rows are segments: packed documents or a tree."""

    def segments(self, length: int) -> Sequence[Segments]:
        """Returns the segments of each row, or one entry for all rows."""
        ...


def check_lookahead(name: str, distance: int, rows: Sequence[Segments]) -> None:
    """Raises ValueError if argument `name` looks ahead (a negative distance) in a tree."""
    if distance < 0 and any(row.branching for row in rows):
        raise ValueError(
            f"{name} asks for {-distance} tokens ahead in a tree, where a token may have several successors"
        )


def segments_of(length: int, documents: object = None, mask: Segmented | None = None) -> tuple[Segments, ...]:
    """Returns the segments of each row, or one entry for all rows. By default all tokens are one document.

    Raises:
        ValueError: both documents and a mask, boundaries that do not rise from 0 to `length`, or a mask without
            segments.
    """
    if mask is not None:
        if documents is not None:
            raise ValueError(f"documents={documents!r} beside mask={mask!r}: pass one of them")
        if not hasattr(mask, "segments"):
            raise ValueError(f"mask is a {type(mask).__name__}; an attention mask of documents or a tree is accepted")
        return tuple(mask.segments(length))
    ends = documents_of(documents, length)
    if ends is None:
        return (Segments.documents((0, length)),)
    rows = ends if isinstance(ends[0], tuple) else (ends,)
    return tuple(Segments.documents(row) for row in rows)  # pyright: ignore[reportArgumentType]
