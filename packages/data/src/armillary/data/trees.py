"""Trees of segments: prompts with several completions, or texts that branch, whose tokens lie depth first.

A prompt is stored once, and each completion once behind it; the same tokens as sequences of their own would repeat the
prompt for each. A *sequence* of a tree is the path from its first segment to one that nothing follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from armillary.core.commands import DamagedInput
from armillary.data.shuffle import Index

SEGMENT = np.dtype([("end", "<i8"), ("parent", "<i4"), ("trained", "<i4"), ("weight", "<f8")])
"""A segment as stores have it: the token of the store after its last; which segment of its tree it follows, counted
from the tree's first, or -1; whether its tokens are labels; and, of the last segment of a sequence, how much that
weighs."""
SegmentArray = npt.NDArray[np.void]


@dataclass(frozen=True, eq=False)
class SegmentTree:
    """Segments in depth-first order: each follows its parent, which is the one before it or an ancestor of that.

    Args:
        starts, lengths: int64 [S], where in the document each segment's tokens are.
        parents: the segment that each follows, or -1.
        trained: bool [S], whether its tokens are labels.
        weights: float64 [S], of the sequences that end with a segment.
    """

    starts: Index
    lengths: Index
    parents: tuple[int, ...]
    trained: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]

    def __len__(self) -> int:
        """Segments, S."""
        return len(self.parents)

    @property
    def tokens(self) -> int:
        """Of all segments."""
        return int(self.lengths.sum())

    @cached_property
    def leaves(self) -> list[int]:
        """The last segment of each sequence."""
        inner = {*self.parents}
        return [s for s in range(len(self)) if s not in inner]

    @cached_property
    def depths(self) -> list[int]:
        """Tokens before each segment on its path."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + int(self.lengths[parent]))
        return found

    @property
    def unshared(self) -> int:
        """Tokens of all sequences, each with all of its own."""
        return sum(self.depths[leaf] + int(self.lengths[leaf]) for leaf in self.leaves)

    @property
    def label_weights(self) -> npt.NDArray[np.float64]:
        """float64 [S]: what a label among a segment's tokens weighs: as much as all sequences that share it."""
        total = self.weights.copy()
        for s in range(len(self) - 1, 0, -1):
            if self.parents[s] >= 0:
                total[self.parents[s]] += total[s]
        return np.where(self.trained, total, 0.0)

    def path(self, segment: int) -> list[int]:
        """The segments from the first to this one."""
        found: list[int] = []
        while segment >= 0:
            found.append(segment)
            segment = self.parents[segment]
        return found[::-1]

    def fitted(self, room: int) -> list[SegmentTree]:
        """The tree in trees of at most `room` tokens, each with as many sequences as fit, in order.

        What several of these share is repeated, so that losses are as before. A sequence that is longer than the room
        by itself ends where that does, and is left out if nothing of its last segment is left.
        """
        if self.tokens <= room:
            return [self]
        parts: list[list[int]] = []
        held = 0
        for leaf in self.leaves:
            path = self.path(leaf)
            if self.depths[leaf] >= room:
                continue
            known = {*parts[-1]} if parts else {*()}
            more = [s for s in path if s not in known]
            size = int(self.lengths[more].sum())
            if parts and held + size <= room:
                parts[-1] += more
                held += size
            else:
                parts.append(path)
                held = self.depths[leaf] + int(self.lengths[leaf])
        return [self._of(sorted(part), room) for part in parts]

    def _of(self, kept: Sequence[int], room: int) -> SegmentTree:
        """These segments alone, cut off after `room` tokens of their path."""
        number = {s: i for i, s in enumerate(kept)} | {-1: -1}
        left = room - np.array([self.depths[s] for s in kept])
        parents = tuple(number[self.parents[s]] for s in kept)
        part = list(kept)
        return SegmentTree(
            self.starts[part], np.minimum(self.lengths[part], left), parents, self.trained[part], self.weights[part]
        )


@dataclass(eq=False)
class SegmentTable:
    """The segments of all trees of a store, `SEGMENT` [S] in the order of their tokens. No segment is empty.

    Raises:
        ValueError: ends that do not rise.
    """

    name: str
    table: SegmentArray

    def __post_init__(self) -> None:
        self._ends: Index = np.ascontiguousarray(self.table["end"], np.int64)
        falling = np.flatnonzero(np.diff(self._ends, prepend=0) <= 0)
        if len(falling):
            raise ValueError(f"{self.name}: segment {falling[0]} has no tokens; prepare the store again")

    def tree(self, start: int, stop: int) -> SegmentTree:
        """Returns the tree of the document with tokens `start` to `stop - 1` of the store.

        Raises:
            DamagedInput: segments that do not end where the document does, or are in no depth-first order.
        """
        first, end = (int(x) for x in np.searchsorted(self._ends, [start, stop], ("right")))
        if first == end or self._ends[end - 1] != stop:
            raise DamagedInput(f"{self.name}: no segments end at tokens {start} to {stop}; prepare the store again")
        rows, ends = self.table[first:end], self._ends[first:end] - start
        starts = np.concatenate([[0], ends[:-1]])
        parents = tuple(rows["parent"].tolist())
        try:
            check_order(parents, f"{self.name}, tokens {start} to {stop}")
        except ValueError as error:
            raise DamagedInput(str(error)) from error
        return SegmentTree(starts, ends - starts, parents, rows["trained"] != 0, rows["weight"].astype(np.float64))

    def figures(self, starts: Index, stops: Index) -> dict[str, int]:
        """Of the trees of some documents: segments, sequences, and the tokens of these, each with all of its own."""
        firsts = np.searchsorted(self._ends, starts, "right")
        rows = [
            range(a, b)
            for a, b in zip(firsts.tolist(), np.searchsorted(self._ends, stops, "right").tolist(), strict=True)
        ]
        parents, lengths = self.table["parent"].tolist(), np.diff(self._ends, prepend=0).tolist()
        below = [0] * len(parents)  # sequences that each segment is part of
        sequences = 0
        for tree in rows:
            for s in reversed(tree):
                sequences += not below[s]
                below[s] = below[s] or 1
                if parents[s] >= 0:
                    below[tree.start + parents[s]] += below[s]
        tokens = sum(lengths[s] * below[s] for tree in rows for s in tree)
        return {"segments": sum(map(len, rows)), "sequences": sequences, "unshared_tokens": tokens}


def check_order(parents: Sequence[int], name: str) -> None:
    """Refuses parents of another order than depth first.

    Raises:
        ValueError: with the first segment that follows neither the one before it nor one of that one's ancestors.
    """
    path: list[int] = []
    for s, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise ValueError(
                f"{name}: segment {s} follows segment {parent}, which is neither the one before it nor one that this "
                "follows; trees are stored depth first"
            )
        path.append(s)


def segment_rows(lengths: Sequence[int], parents: Sequence[int], trained: Sequence[bool], weights: Any) -> SegmentArray:
    """`SEGMENT` [S] of one tree by itself: segments of these lengths."""
    rows = np.zeros(len(lengths), SEGMENT)
    rows["end"], rows["parent"] = np.cumsum(lengths), parents
    rows["trained"], rows["weight"] = trained, weights
    return rows
