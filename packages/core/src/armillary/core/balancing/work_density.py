"""The attention work of tokens, in (query, key) pairs, and the groups of tokens that have most of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from armillary.core.slices import Integers, KeyCounts, Slices, mirror

MAX_GROUPS = 4
"""Maximum number of groups that `split_by_density` forms."""


@dataclass(frozen=True)
class Work:
    """Counts of the visible (query, key) pairs of each token, as a query and as a key, summed over batch rows.

    Args:
        sides: for each batch row the number of keys that a query sees; and the number of queries that see a key.
    """

    sides: tuple[list[KeyCounts], list[KeyCounts]]

    @classmethod
    def of(cls, rows: Sequence[Slices]) -> Work:
        return cls(([KeyCounts.of(row) for row in rows], [KeyCounts.of(mirror(row)) for row in rows]))

    @property
    def total(self) -> int:
        """Pairs of all tokens."""
        # The last piece of the counts begins after the last query that has keys, so all pairs are before it.
        return sum(int(counts.before(counts.starts[-1:] + 1)[0]) for counts in self.sides[0] if len(counts.starts))

    def before(self, positions: Integers) -> Integers:
        """Returns the pairs of all queries, and of all keys, before each of these positions [n]: [2, n]."""
        return np.array([np.sum([counts.before(positions) for counts in side], axis=0) for side in self.sides])


@dataclass(frozen=True)
class TokenRuns:
    """Some tokens of a sequence: runs of positions starts[i] to stops[i] - 1. Token numbers count through all runs."""

    starts: Integers
    stops: Integers

    @cached_property
    def offsets(self) -> Integers:
        """The number of the first token of each run, and the total number of tokens."""
        return np.concatenate(([0], np.cumsum(self.stops - self.starts)))

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def pairs(self, ends: Integers, work: Work) -> Integers:
        """Returns the pairs of the tokens between consecutive `ends`, which are token numbers [n + 1]: [2, n]."""
        # Pairs of all tokens before a position, less the pairs of tokens outside of the runs (`skipped_pairs`).
        run = np.minimum(np.searchsorted(self.offsets, ends, side="right") - 1, len(self.starts) - 1)
        before = work.before(self.starts)
        skipped_pairs = before - np.concatenate((np.zeros((2, 1), np.int64), work.before(self.stops)[:, :-1]), axis=1)
        positions = self.starts[run] + ends - self.offsets[run]
        return np.diff(work.before(positions) - np.cumsum(skipped_pairs, axis=1)[:, run])

    def spans(self, start: int, stop: int) -> list[range]:
        """Returns the positions of the tokens numbered start..stop - 1."""
        first = np.maximum(self.starts, self.starts + start - self.offsets[:-1])
        last = np.minimum(self.stops, self.starts + stop - self.offsets[:-1])
        return [range(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True) if a < b]

    def select(self, starts: Integers, stops: Integers) -> TokenRuns:
        """Returns the tokens with the numbers starts[i] to stops[i] - 1, for every i."""
        spans = [span for a, b in zip(starts.tolist(), stops.tolist(), strict=True) for span in self.spans(a, b)]
        return TokenRuns(np.array([span.start for span in spans]), np.array([span.stop for span in spans]))


def split_by_density(runs: TokenRuns, chunks: int, work: Work, limit: float) -> list[TokenRuns]:
    """Splits tokens into groups of rising density (pairs per token), of which a caller cuts each into `chunks` chunks.

    1. Cut the tokens into `chunks` chunks. The chunks with at most `limit` pairs form a group.
    2. Repeat with the tokens of all other chunks: their new chunks are smaller, so that fewer exceed `limit`.

    The number of tokens in every group except the first is divisible by `chunks`.
    """
    groups = list[TokenRuns]()
    while len(groups) < MAX_GROUPS - 1:
        ends = equal_ends(runs.size, chunks)
        dense = runs.pairs(ends, work).max(0) > limit
        starts, stops = dense_runs(ends, dense, chunks)
        dense_size = int((stops - starts).sum())
        if not 0 < dense_size <= runs.size - chunks:
            break  # no chunk is dense, or the sparse tokens would not suffice for `chunks` chunks
        sparse = np.concatenate(([0], stops)), np.concatenate((starts, [runs.size]))
        groups.append(runs.select(*sparse))
        runs = runs.select(starts, stops)
    return [*groups, runs]


def dense_runs(ends: Integers, dense: NDArray[np.bool_], chunks: int) -> tuple[Integers, Integers]:
    """Returns the runs (starts, stops) of tokens in dense chunks.

    Neighbouring tokens are added until the number of tokens is divisible by `chunks`. If there are too few neighbours,
    no runs are returned.
    """
    # Consecutive dense chunks are one run. `edges`: the chunks at which a run begins, ends, begins, ...
    edges = np.flatnonzero(np.diff(np.concatenate(([False], dense, [False])).astype(np.int64)))
    starts, stops = ends[edges[::2]], ends[edges[1::2]]
    # The last run grows to the right; if the sequence ends there, the first run grows to the left.
    padding = -int((stops - starts).sum()) % chunks
    if padding and stops[-1] + padding <= ends[-1]:
        stops[-1] += padding
    elif padding:
        starts[0] -= min(padding, starts[0])
    fits = int((stops - starts).sum()) % chunks == 0
    return (starts, stops) if fits else (starts[:0], stops[:0])


def equal_ends(size: int, chunks: int) -> Integers:
    """Returns the boundaries of `chunks` chunks whose sizes differ by at most one, larger ones first."""
    base, remainder = divmod(size, chunks)
    numbers = np.arange(chunks + 1)
    return base * numbers + np.minimum(numbers, remainder)
