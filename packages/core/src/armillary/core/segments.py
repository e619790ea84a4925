"""Segments of a row of tokens: packed documents, or the branches of a prefix tree.

Layers with a state (convolutions, linear attention) and token shifts run along the paths of a tree, from a root to each
leaf. Inside a segment the token before position i is i - 1. Before the first token of a segment comes the last token of
its parent segment; a document, or a root of a tree, has no parent and no token before it.
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
        """Returns the slices of the mask in which a token sees the tokens of its path, up to itself.

        Segments must be in depth-first order. Each segment has one slice: the keys are its tokens, the queries its
        tokens and those of all descendants. Segments that follow each other as only children share one slice.
        """
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
    """Returns the number of tokens that precede each segment on its path, from the first token of the root on.

    Args:
        parents: as in `Segments`.
        lengths: number of tokens of each segment.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == MISSING else depths[parent] + lengths[parent])
    return depths


def misplaced_segment(parents: Sequence[int]) -> int | None:
    """Returns the first segment that violates depth-first order; None if no segment does.

    The parent of a segment must be the segment before it, an ancestor of that segment, or -1.
    """
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
    """Raises ValueError if `distance`, the argument called `name`, is negative and a row is a tree."""
    if distance < 0 and any(row.branching for row in rows):
        raise ValueError(
            f"{name} asks for {-distance} tokens ahead in a tree, where a token may have several successors"
        )


def segments_of(length: int, documents: object = None, mask: Segmented | None = None) -> tuple[Segments, ...]:
    """Returns the segments of each batch row, or a single entry that holds for all rows.

    Args:
        documents: document boundaries; without these and without a mask, all tokens are one document.
        mask: an attention mask of documents or a tree, instead of `documents`.

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
    ends = documents_of(documents, length)
    if ends is None:
        return (Segments.documents((0, length)),)
    rows = ends if isinstance(ends[0], tuple) else (ends,)
    return tuple(Segments.documents(row) for row in rows)  # pyright: ignore[reportArgumentType]
