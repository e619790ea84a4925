"""Segments of a row of tokens: packed documents, or the branches of a prefix tree.

A layer with a state runs along paths. The token before position i is i - 1 inside a segment; at a segment's start it is
the last token of the parent segment, and for a document, or the root of a tree, there is none.
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
"""Stands for a position or a segment that does not exist."""


@dataclass(frozen=True)
class Segments:
    """The segments of one row. Immutable and hashable.

    Args:
        ends: boundaries 0, end of the first segment, ..., N.
        parents: the parent of each segment, an earlier one; -1 for documents and roots.
    """

    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def documents(cls, ends: Sequence[int]) -> Segments:
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
        if distance < 0:
            later = positions - distance
            return np.where(later < ends[segment + 1], later, NONE)
        position, steps_left = positions.copy(), np.full_like(positions, distance)
        # Each iteration moves the tokens whose ancestor lies before their segment to the end of the parent segment.
        while (beyond := np.flatnonzero((steps_left > position - ends[segment]) & (position != NONE))).size:
            parent = parents[segment[beyond]]
            steps_left[beyond] -= position[beyond] - ends[segment[beyond]] + 1
            position[beyond] = np.where(parent == NONE, NONE, ends[parent + 1] - 1)
            segment[beyond] = parent
            steps_left[beyond[parent == NONE]] = 0
        return np.where(position == NONE, NONE, position - steps_left)

    @cached_property
    def last_descendants(self) -> list[int]:
        """The last descendant of each segment, itself if it has none. Segments are in depth-first order."""
        last = list(range(len(self.parents)))
        for segment in range(len(last) - 1, 0, -1):
            if (parent := self.parents[segment]) != NONE:
                last[parent] = max(last[parent], last[segment])
        return last

    def slices(self, length: int) -> list[Slices]:
        """Returns the slices of the mask in which a token sees its path up to itself. Segments are depth first.

        One slice for each segment: its queries run from its start to the end of its last descendant. Segments in a
        chain of only children, one after another, share a slice.
        """
        (ends, parents), children = self._arrays, np.zeros(len(self.parents), dtype=np.int64)
        np.add.at(children, parents[parents != NONE], 1)
        # Depth-first order: all descendants of a segment follow it without a gap.
        only_child = (parents != NONE) & (parents == np.arange(-1, len(parents) - 1)) & (children[parents] == 1)
        first = np.flatnonzero(~only_child)
        last = np.append(first[1:], len(parents)) - 1
        slices = np.empty((len(first), 6), dtype=np.int64)
        slices[:, 0] = slices[:, 2] = ends[first]
        slices[:, 1], slices[:, 3] = ends[np.array(self.last_descendants)[last] + 1], ends[last + 1]
        slices[:, 4], slices[:, 5] = -FAR, 0
        return [slices]

    def runs(self, spans: Iterable[range]) -> list[range]:
        """Returns the runs of a shard's spans in local order: cut at the boundaries of segments and at steps."""
        return [run for span in spans for run in self.cut(span)]

    def cut(self, span: range) -> list[range]:
        """Cuts a span into runs of adjacent tokens of one segment.

        A span with a step above 1 becomes runs of one token.
        """
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
    path: list[int] = []  # from the root to the previous segment, on which the next parent must be
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != NONE and not path:
            return segment
        path.append(segment)
    return None


class Segmented(Protocol):
    """A mask whose rows are segments: an attention mask of documents or of a tree."""

    def segments(self, length: int) -> Sequence[Segments]:
        """Returns the segments of each row that has its own, or of all rows alike."""
        ...


def check_left(name: str, distance: int, rows: Sequence[Segments]) -> None:
    """Raises ValueError for tokens that lie ahead (a negative distance) in a tree.

    Args:
        name: of the argument, for the error.
    """
    if distance < 0 and any(row.branching for row in rows):
        raise ValueError(
            f"{name} asks for {-distance} tokens ahead in a tree, where a token may have several successors"
        )


def segments_of(length: int, documents: object = None, mask: Segmented | None = None) -> tuple[Segments, ...]:
    """Returns the segments of each row, or one entry for all rows alike.

    Raises:
        ValueError: documents beside a mask, boundaries that do not rise from 0 to `length`, or a mask without
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
