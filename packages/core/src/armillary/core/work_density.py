"""Parts of a sequence, what there is to compute for their tokens, and where that lies densest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from armillary.core.slices import Integers, KeyCounts, Slices, mirrored

PARTS = 4
"""At most, by how densely pairs lie."""


@dataclass(frozen=True)
class Work:
    """(query, key) pairs of the tokens of a sequence, as queries and as keys; of all rows of a batch together."""

    sides: tuple[list[KeyCounts], list[KeyCounts]]

    @classmethod
    def of(cls, rows: Sequence[Slices]) -> Work:
        return cls(([KeyCounts.of(row) for row in rows], [KeyCounts.of(mirrored(row)) for row in rows]))

    @property
    def total(self) -> int:
        """Pairs of all tokens."""
        return sum(int(counts.before(counts.starts[-1:] + 1)[0]) for counts in self.sides[0] if len(counts.starts))

    def before(self, positions: Integers) -> Integers:
        """Pairs of all tokens before each of these positions [n], as [2, n]: of queries, and of keys."""
        return np.array([np.sum([counts.before(positions) for counts in side], axis=0) for side in self.sides])


@dataclass(frozen=True)
class TokenRuns:
    """Some tokens of a sequence, numbered as they follow each other: runs of positions from starts to stops - 1."""

    starts: Integers
    stops: Integers

    @cached_property
    def offsets(self) -> Integers:
        """The number of the first token of each run, and how many tokens there are."""
        return np.concatenate(([0], np.cumsum(self.stops - self.starts)))

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def pairs(self, ends: Integers, work: Work) -> Integers:
        """Of the tokens between each two of these numbers: [2, n]."""
        run = np.minimum(np.searchsorted(self.offsets, ends, side="right") - 1, len(self.starts) - 1)
        before = work.before(self.starts)
        skipped = before - np.concatenate((np.zeros((2, 1), np.int64), work.before(self.stops)[:, :-1]), axis=1)
        positions = self.starts[run] + ends - self.offsets[run]
        return np.diff(work.before(positions) - np.cumsum(skipped, axis=1)[:, run])

    def spans(self, start: int, stop: int) -> list[range]:
        """The positions of the tokens numbered start..stop - 1."""
        first = np.maximum(self.starts, self.starts + start - self.offsets[:-1])
        last = np.minimum(self.stops, self.starts + stop - self.offsets[:-1])
        return [range(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True) if a < b]

    def chosen(self, starts: Integers, stops: Integers) -> TokenRuns:
        """The part of it with the tokens of these numbers."""
        spans = [span for a, b in zip(starts.tolist(), stops.tolist(), strict=True) for span in self.spans(a, b)]
        return TokenRuns(np.array([span.start for span in spans]), np.array([span.stop for span in spans]))


def by_density(part: TokenRuns, chunks: int, work: Work, most: float) -> list[TokenRuns]:
    """The part, without those of its chunks that have more pairs than `most`; these, without those that have when cut
    again; and so on. All but the first can be cut in chunks of one size."""
    parts = list[TokenRuns]()
    while len(parts) < PARTS - 1:
        ends = equal_ends(part.size, chunks)
        dense = part.pairs(ends, work).max(0) > most
        starts, stops = whole_chunks(ends, dense, chunks)
        taken = int((stops - starts).sum())
        if not 0 < taken <= part.size - chunks:
            break
        rest = np.concatenate(([0], stops)), np.concatenate((starts, [part.size]))
        parts.append(part.chosen(*rest))
        part = part.chosen(starts, stops)
    return [*parts, part]


def whole_chunks(ends: Integers, chosen: NDArray[np.bool_], chunks: int) -> tuple[Integers, Integers]:
    """Runs of tokens, starts and stops, with all of the chosen chunks, and as many more that `chunks` divides them."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int64)))
    starts, stops = ends[edges[::2]], ends[edges[1::2]]
    more = -int((stops - starts).sum()) % chunks
    if more and stops[-1] + more <= ends[-1]:
        stops[-1] += more
    elif more:
        starts[0] -= min(more, starts[0])
    fits = int((stops - starts).sum()) % chunks == 0
    return (starts, stops) if fits else (starts[:0], stops[:0])


def equal_ends(size: int, chunks: int) -> Integers:
    """Boundaries of so many chunks, whose sizes differ by one at most, larger ones first."""
    base, more = divmod(size, chunks)
    numbers = np.arange(chunks + 1)
    return base * numbers + np.minimum(numbers, more)
