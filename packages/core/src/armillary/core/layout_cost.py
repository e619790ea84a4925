"""The cost of layouts: attention work of each shard, and token-hops around a ring. All arrays are numpy's.

The work of a token is counted in visible (query, key) pairs, and twice: the pairs of its query, and those of its key.
Shards compute the former when keys rotate, the latter when queries rotate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from armillary.core.slices import Integers, KeyCounts, Slices, mirror, trim

Floats = NDArray[np.float64]

GRID = 512
"""Number of positions per document at which pairs are counted exactly. Between these, counts are interpolated."""


@dataclass(frozen=True)
class PositionRuns:
    """A layout as consecutive runs of positions.

    Args:
        ends: boundaries of the runs, from 0 to the length: [n + 1].
        owners: the shard that holds each run: [n].
    """

    ends: Integers
    owners: Integers

    @classmethod
    def of(cls, ends: Integers, owners: Integers) -> PositionRuns:
        # Joins neighbouring runs of one shard and drops empty runs.
        size = np.diff(ends)
        starts, owners = ends[:-1][size > 0], owners[size > 0]
        changes_owner = np.append(True, owners[1:] != owners[:-1])
        return cls(np.append(starts[changes_owner], ends[-1]), owners[changes_owner])

    @classmethod
    def of_spans(cls, shards: Iterable[Sequence[range]]) -> PositionRuns:
        starts, owners, length = list[Integers](), list[int](), 0
        for shard, spans in enumerate(shards):
            for span in spans:
                starts.append(np.array([span.start]) if span.step == 1 else np.arange(span.start, span.stop, span.step))
                owners.append(shard)
                length += len(span)
        first, owner = np.concatenate(starts), np.repeat(owners, [len(each) for each in starts])
        order = np.argsort(first, kind="stable")
        return cls.of(np.append(first[order], length), owner[order])

    def spans(self, shards: int) -> list[list[range]]:
        lists: list[list[range]] = [[] for _ in range(shards)]
        for start, stop, owner in zip(self.ends.tolist(), self.ends[1:].tolist(), self.owners.tolist(), strict=False):
            lists[owner].append(range(start, stop))
        return lists


@dataclass(frozen=True)
class LayoutWithCost:
    """A layout with its cost: `pairs` are those of the rank that has most."""

    layout: PositionRuns
    unevenness: float
    pairs: int
    ring: RingShares

    @cached_property
    def hops(self) -> int:
        """Token-hops of keys if pairs count by query, of queries if by key; their sum if pairs count by both.

        Those of states are added: where a document is cut, all other ranks get the state (`RingShares.state_tokens`).
        """
        by_side = self.ring.rows, [mirror(row) for row in self.ring.rows]
        hops = sum(token_hops(self.layout, self.ring.shards, by_side[side]) for side in self.ring.sides)
        if not self.ring.state_tokens:
            return hops
        cuts = len(np.setdiff1d(self.layout.ends, self.ring.ends))
        return hops + cuts * self.ring.state_tokens * (self.ring.shards - 1)


@dataclass(frozen=True)
class RingShares:
    """A sequence to distribute over the ranks of a ring, measured in shares: the means over all ranks.

    Args:
        rows: slices of the mask for each batch row. Their pairs are added.
        sides: the ranks to which pairs count: 0 for the rank of the query, 1 for the rank of the key, (0, 1) for each.
        state_tokens: tokens of keys and values that take as many bytes as a state; 0 without layers with one.
        profiles: cache of `profile`.
    """

    length: int
    shards: int
    rows: Sequence[Slices]
    sides: tuple[int, ...] = (0,)
    state_tokens: int = 0
    profiles: dict[int, tuple[Integers, Floats]] = field(default_factory=dict[int, tuple[Integers, Floats]])

    @cached_property
    def _key_counts(self) -> tuple[list[KeyCounts], list[KeyCounts]]:
        """Keys that each query sees, and queries that see each key, by batch row."""
        return [KeyCounts.of(row) for row in self.rows], [KeyCounts.of(mirror(row)) for row in self.rows]

    def pairs_before(self, positions: Integers) -> Integers:
        """Returns the pairs of all queries, and of all keys, before each position [n]: [2, n]."""
        return np.array([np.sum([row.before(positions) for row in side], axis=0) for side in self._key_counts])

    @cached_property
    def shares(self) -> Floats:
        """Mean number of tokens and of pairs per rank: [2]."""
        total = int(self.pairs_before(np.array([self.length]))[0, 0])
        return np.array([self.length, max(1, total)]) / self.shards

    def before(self, positions: Integers) -> Floats:
        """Returns the tokens before each position [n], and the pairs by each side, in shares: [1 + sides, n]."""
        pairs = self.pairs_before(positions)[list(self.sides)]
        return np.vstack((positions / self.shares[0], (pairs / self.shares[1]).astype(np.float64)))

    @cached_property
    def ends(self) -> Integers:
        """Boundaries 0, ..., N of documents: positions on different sides of one do not see each other in any row."""
        slices = np.concatenate([trim(row) for row in self.rows])
        starts, stops = np.minimum(slices[:, 0], slices[:, 2]), np.maximum(slices[:, 1], slices[:, 3])
        order = np.argsort(starts, kind="stable")
        # A slice that starts at or after `reach`, the largest stop of all slices before it, begins a new run.
        starts, reach = starts[order], np.maximum.accumulate(np.append(0, stops[order]))
        free = starts >= reach[:-1]
        return np.unique(np.concatenate(([0, self.length], starts[free], reach[:-1][free], reach[-1:])))

    @cached_property
    def measures(self) -> Floats:
        """Tokens and pairs before each of `ends`, in shares: [1 + sides, documents + 1]."""
        return self.before(self.ends)

    def profile(self, document: int) -> tuple[Integers, Floats]:
        """Returns a grid of positions in a document, and the document's tokens and pairs before each of these."""
        if document not in self.profiles:
            start, stop = self.ends[document : document + 2].tolist()
            grid = start + equal_ends(stop - start, min(stop - start, GRID))
            measures = self.before(grid)
            self.profiles[document] = grid, measures - measures[:, :1]
        return self.profiles[document]

    def pairs_of_shards(self, layout: PositionRuns) -> Integers:
        sizes = np.diff(self.pairs_before(layout.ends))
        pairs = np.zeros((2, self.shards), sizes.dtype)  # Python's integers for sequences of billions of tokens
        for side, side_sizes in zip(pairs, sizes, strict=True):
            np.add.at(side, layout.owners, side_sizes)
        return pairs

    def loads(self, layout: PositionRuns) -> Floats:
        """Returns the tokens and the pairs of each shard, by each side, in shares: [1 + sides, shards]."""
        tokens = np.bincount(layout.owners, np.diff(layout.ends), self.shards)
        pairs = self.pairs_of_shards(layout)[list(self.sides)]
        return np.vstack((tokens / self.shares[0], (pairs / self.shares[1]).astype(np.float64)))

    def candidate(self, layout: PositionRuns) -> LayoutWithCost:
        # Infinitely uneven if a shard is empty, which layouts do not allow.
        pairs = int(self.pairs_of_shards(layout)[list(self.sides)].max())
        tokens = np.bincount(layout.owners, np.diff(layout.ends), self.shards)
        worst = max(tokens.max() / self.shares[0], pairs / self.shares[1]) if tokens.all() else np.inf
        return LayoutWithCost(layout, float(worst), pairs, self)


def token_hops(layout: PositionRuns, shards: int, rows: Sequence[Slices]) -> int:
    """Returns the number of tokens that all ranks together send if keys rotate in the cheaper direction."""
    ends, owners = layout.ends, layout.owners
    ranks, starts, stops = _visible_keys(layout, rows)
    if not len(ranks):
        return 0
    # A token counts once for each hop, from one rank to the next. All shards of a ring travel in the same direction, so
    # the rank just before a key's owner is almost a full round away.
    # Between consecutive bounds all tokens have the same owner and are seen by the same ranks: compute hops for each
    # of these intervals, and multiply by its number of tokens.
    bounds = np.unique(np.concatenate((starts, stops, ends)))
    sizes, owner = np.diff(bounds), owners[np.searchsorted(ends, bounds[:-1], side="right") - 1]
    first, last = np.searchsorted(bounds, starts), np.searchsorted(bounds, stops)
    forward, backward = np.zeros_like(sizes), np.zeros_like(sizes)  # hops of each interval, by direction
    order = np.argsort(ranks, kind="stable")
    cuts = np.searchsorted(ranks[order], np.arange(shards + 1))
    for rank in range(shards):
        key_runs = order[cuts[rank] : cuts[rank + 1]]  # the runs of keys that this rank sees
        if len(key_runs):
            # +1 where a run of visible keys starts and -1 where it stops: their running sum is positive inside.
            begins = np.bincount(first[key_runs], minlength=len(bounds))
            visible = (begins - np.bincount(last[key_runs], minlength=len(bounds))).cumsum()[:-1] > 0
            # A token travels as far as the furthest rank that sees it.
            np.maximum(forward, visible * ((rank - owner) % shards), out=forward)
            np.maximum(backward, visible * ((owner - rank) % shards), out=backward)
    return min(int((forward * sizes).sum()), int((backward * sizes).sum()))


def _visible_keys(layout: PositionRuns, rows: Sequence[Slices]) -> tuple[Integers, Integers, Integers]:
    """Returns the runs of keys that ranks see and do not hold in one run: arrays of (rank, start, stop)."""
    ends, owners = layout.ends, layout.owners
    visible_runs = list[Integers]()
    for row in rows:
        # Slice i has queries in the runs first[i] to last[i] - 1 of the layout. Each pair of a slice and such a run is
        # an entry of the arrays below: `index` is the number of the slice, `run` that of the run.
        q0, q1, k0, k1, low, high = trim(row).T
        first, last = np.searchsorted(ends, q0, side="right") - 1, np.searchsorted(ends, q1)
        counts = last - first
        index = np.repeat(np.arange(len(q0)), counts)
        run = first[index] + np.arange(len(index)) - np.repeat(counts.cumsum() - counts, counts)
        q0, q1, k0, k1, low, high = (x[index] for x in (q0, q1, k0, k1, low, high))
        # The keys that the entry's queries see: from the first query's lowest key to the last query's highest one.
        start = np.maximum(k0, np.maximum(q0, ends[run]) + low)
        stop = np.minimum(k1, np.minimum(q1, ends[run + 1]) + high)
        # Keys inside a single run of the same rank need not be sent.
        key_run = np.minimum(np.searchsorted(ends, start, side="right") - 1, len(owners) - 1)
        is_local = (stop <= ends[key_run + 1]) & (owners[key_run] == owners[run])
        visible_runs.append(np.stack((owners[run], start, stop))[:, (start < stop) & ~is_local])
    ranks, starts, stops = np.concatenate(visible_runs, axis=1)
    return ranks, starts, stops


def equal_ends(size: int, chunks: int) -> Integers:
    """Returns the boundaries of `chunks` chunks whose sizes differ by at most one, larger ones first."""
    base, remainder = divmod(size, chunks)
    numbers = np.arange(chunks + 1)
    return base * numbers + np.minimum(numbers, remainder)
