"""Trees of segments: prompts with several completions, or texts that branch, stored depth first.

A prompt is stored once, followed by its completions; stored as separate sequences, each completion would repeat the
prompt. A *sequence* of a tree is the path from its root to a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from armillary.core.segments import misplaced_segment, path_depths
from armillary.data.console.exit import DamagedInput
from armillary.data.shuffle import Index

SEGMENT = np.dtype([("end", "<i8"), ("parent", "<i4"), ("trained", "<i4"), ("weight", "<f8")])
"""A segment in a file:

- end: its last token + 1, counted over all tokens of the store;
- parent: the number of its parent segment within the tree, or -1;
- trained: 1 if its tokens are labels, else 0;
- weight: the weight of the sequence that ends with it; 0 if it has children."""
SegmentArray = npt.NDArray[np.void]


@dataclass(frozen=True, eq=False)
class SegmentTree:
    """Segments in depth-first order: the parent of a segment is the segment before it, an ancestor of that, or none.

    Args:
        starts, lengths: int64 [S], first token of each segment in its document, and its number of tokens.
        parents: the parent of each segment, or -1.
        trained: bool [S], true if the tokens of the segment are labels.
        weights: float64 [S], weight of the sequence that ends with the segment; 0 if it has children.
    """

    starts: Index
    lengths: Index
    parents: tuple[int, ...]
    trained: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]

    def __len__(self) -> int:
        """Number of segments, S."""
        return len(self.parents)

    @property
    def tokens(self) -> int:
        """Number of tokens in all segments."""
        return int(self.lengths.sum())

    @cached_property
    def depths(self) -> list[int]:
        """Number of tokens before each segment on its path."""
        return path_depths(self.parents, self.lengths.tolist())

    @property
    def label_weights(self) -> npt.NDArray[np.float64]:
        """Weight of each label in a segment, float64 [S].

        The sum of the weights of the sequences that share the segment, or 0 if its tokens are not labels.
        """
        total = self.weights.copy()
        for s in range(len(self) - 1, 0, -1):  # children come after their parents
            if self.parents[s] >= 0:
                total[self.parents[s]] += total[s]
        return np.where(self.trained, total, 0.0)

    def path(self, segment: int) -> list[int]:
        """Returns the segments from the root to `segment`."""
        path: list[int] = []
        while segment >= 0:
            path.append(segment)
            segment = self.parents[segment]
        return path[::-1]

    def split(self, length: int) -> list[SegmentTree]:
        """Splits the tree into trees of at most `length` tokens, each with as many consecutive sequences as fit.

        Shared segments are repeated in each new tree, so that losses do not change. A sequence longer than `length` is
        truncated, and dropped if nothing of its last segment remains.
        """
        if self.tokens <= length:
            return [self]
        groups: list[set[int]] = []  # the segments of each new tree
        tokens = 0  # tokens of the last group's segments
        for leaf in sorted({*range(len(self))} - {*self.parents}):
            if self.depths[leaf] >= length:  # nothing of the leaf would remain
                continue
            # Greedy, in depth-first order: consecutive sequences share most segments, and a sequence adds only those
            # that the current tree does not have yet.
            path = self.path(leaf)
            new_segments = set(path) - (groups[-1] if groups else set[int]())
            added_tokens = int(self.lengths[[*new_segments]].sum())
            if groups and tokens + added_tokens <= length:
                groups[-1] |= new_segments
                tokens += added_tokens
            else:  # a new tree, which repeats the whole path of its first sequence
                groups.append({*path})
                tokens = self.depths[leaf] + int(self.lengths[leaf])
        return [self._select(sorted(group), length) for group in groups]

    def _select(self, segments: list[int], length: int) -> SegmentTree:
        """Returns the tree of `segments`, which include their ancestors, with each path cut after `length` tokens."""
        number = {segment: i for i, segment in enumerate(segments)} | {-1: -1}  # numbers in the new tree; -1: no parent
        # Only a sequence that is alone in its tree may be longer than `length`, so only its leaf is cut.
        room = length - np.array([self.depths[s] for s in segments])
        return SegmentTree(
            self.starts[segments],
            np.minimum(self.lengths[segments], room),
            tuple(number[self.parents[s]] for s in segments),
            self.trained[segments],
            self.weights[segments],
        )


@dataclass(eq=False)
class SegmentTable:
    """Segments of all trees of a store, in the order of their tokens.

    Args:
        name: path of the file, for error messages.
        table: `SEGMENT` [S], a row for each segment.

    Raises:
        ValueError: a segment without tokens: ends must increase.
    """

    name: str
    table: SegmentArray

    def __post_init__(self) -> None:
        self._ends: Index = np.ascontiguousarray(self.table["end"], np.int64)
        empty = np.flatnonzero(np.diff(self._ends, prepend=0) <= 0)
        if len(empty):
            raise ValueError(f"{self.name}: segment {empty[0]} has no tokens; prepare the store again")

    def tree(self, start: int, stop: int) -> SegmentTree:
        """Returns the tree of the document with tokens `start` to `stop - 1` of the store.

        Raises:
            DamagedInput: segments that do not end with the document, or are not in depth-first order.
        """
        first, last = (int(x) for x in np.searchsorted(self._ends, [start, stop], "right"))
        if first == last or self._ends[last - 1] != stop:
            tokens = f"tokens {start} to {stop - 1}"
            raise DamagedInput(f"{self.name}: no segment ends with the document of {tokens}; prepare the store again")
        rows, ends = self.table[first:last], self._ends[first:last] - start
        starts = np.concatenate([[0], ends[:-1]])
        parents = tuple(rows["parent"].tolist())
        if (segment := misplaced_segment(parents)) is not None:
            raise DamagedInput(
                f"{self.name}, tokens {start} to {stop}: segment {segment} follows segment {parents[segment]}, which "
                "is neither the one before it nor one of its ancestors; trees are stored depth first"
            )
        return SegmentTree(starts, ends - starts, parents, rows["trained"] != 0, rows["weight"].astype(np.float64))

    def count_sequences(self, starts: Index, stops: Index) -> dict[str, int]:
        """Counts segments and sequences of the documents with tokens `starts` to `stops - 1` (int64 [D] each).

        "unshared_tokens" are the tokens that the sequences would have if each were stored separately.
        """
        # `segments` are the documents' rows of the table, one document after the other, and `offsets` the number of
        # segments of earlier documents. With them, parents count over `segments` instead of one tree.
        first, last = (np.searchsorted(self._ends, edges, "right") for edges in (starts, stops))
        counts = last - first
        offsets = np.repeat(np.cumsum(counts) - counts, counts)
        segments = np.repeat(first, counts) + np.arange(counts.sum()) - offsets
        parents = self.table["parent"][segments]
        parents, lengths = np.where(parents < 0, -1, parents + offsets), np.diff(self._ends, prepend=0)[segments]
        path_lengths = np.array(path_depths(parents.tolist(), lengths.tolist()), np.int64) + lengths
        # A segment is a leaf unless the next one is its child: in depth-first order the first child directly follows.
        leaves = np.append(parents[1:], -1) != np.arange(len(parents))
        tokens = int(path_lengths[leaves].sum())
        return {"segments": len(parents), "sequences": int(leaves.sum()), "unshared_tokens": tokens}
