"""Token-hops: the distance that the tokens of a layout travel around a ring. Arrays on the host.

A ring sends every shard in one direction, and a token no further than to the last rank that sees it. A rank just before
the owner of a token is therefore almost a full round away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from armillary.core.slices import Integers, Slices, trim


@dataclass(frozen=True)
class PositionRuns:
    """A layout as consecutive segments of positions.

    Args:
        ends: boundaries, from 0 to the length: [n + 1].
        owners: the shard of each segment: [n].
    """

    ends: Integers
    owners: Integers

    @classmethod
    def of(cls, ends: Integers, owners: Integers) -> PositionRuns:
        """Joins neighbouring segments of one shard and drops empty ones."""
        size = np.diff(ends)
        starts, owners = ends[:-1][size > 0], owners[size > 0]
        turns = np.append(True, owners[1:] != owners[:-1])
        return cls(np.append(starts[turns], ends[-1]), owners[turns])

    @classmethod
    def of_spans(cls, shards: Iterable[Sequence[range]]) -> PositionRuns:
        """Returns the segments of a layout's spans. A span with a step becomes one segment per position."""
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
        """Returns the spans of each shard, in rising order."""
        lists: list[list[range]] = [[] for _ in range(shards)]
        for start, stop, owner in zip(self.ends.tolist(), self.ends[1:].tolist(), self.owners.tolist(), strict=False):
            lists[owner].append(range(start, stop))
        return lists


def token_hops(segments: PositionRuns, shards: int, rows: Sequence[Slices]) -> int:
    """Returns the tokens that all ranks send if keys rotate in the cheaper direction; a token counts once per hop."""
    ends, owners = segments.ends, segments.owners
    ranks, starts, stops = _visible_keys(segments, rows)
    if not len(ranks):
        return 0
    # Between consecutive bounds, all tokens have the same owner and are seen by the same ranks.
    bounds = np.unique(np.concatenate((starts, stops, ends)))
    sizes, owner = np.diff(bounds), owners[np.searchsorted(ends, bounds[:-1], side="right") - 1]
    first, last = np.searchsorted(bounds, starts), np.searchsorted(bounds, stops)
    forward, backward = np.zeros_like(sizes), np.zeros_like(sizes)
    order = np.argsort(ranks, kind="stable")
    cuts = np.searchsorted(ranks[order], np.arange(shards + 1))
    for rank in range(shards):
        rank_runs = order[cuts[rank] : cuts[rank + 1]]
        if len(rank_runs):
            # +1 where a run of visible keys starts and -1 where it stops: their running sum is positive inside.
            edges = np.bincount(first[rank_runs], minlength=len(bounds)) - np.bincount(
                last[rank_runs], minlength=len(bounds)
            )
            visible = edges.cumsum()[:-1] > 0
            # A token travels as far as the furthest rank that sees it.
            np.maximum(forward, visible * ((rank - owner) % shards), out=forward)
            np.maximum(backward, visible * ((owner - rank) % shards), out=backward)
    return min(int((forward * sizes).sum()), int((backward * sizes).sum()))


def _visible_keys(segments: PositionRuns, rows: Sequence[Slices]) -> tuple[Integers, Integers, Integers]:
    """Returns runs of keys that ranks see outside of their own segment: arrays (rank, start, stop)."""
    ends, owners = segments.ends, segments.owners
    runs = list[Integers]()
    for row in rows:
        q0, q1, k0, k1, low, high = trim(row).T
        first, last = np.searchsorted(ends, q0, side="right") - 1, np.searchsorted(ends, q1)
        # One entry per (slice, segment of its queries): entries of slice i are `of == i`.
        counts = last - first
        of = np.repeat(np.arange(len(q0)), counts)
        segment = first[of] + np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
        start = np.maximum(k0[of], np.maximum(q0[of], ends[segment]) + low[of])
        stop = np.minimum(k1[of], np.minimum(q1[of], ends[segment + 1]) + high[of])
        key_segment = np.minimum(np.searchsorted(ends, start, side="right") - 1, len(owners) - 1)
        local = (stop <= ends[key_segment + 1]) & (owners[key_segment] == owners[segment])
        crosses = (start < stop) & ~local
        runs.append(np.stack((owners[segment], start, stop))[:, crosses])
    ranks, starts, stops = np.concatenate(runs, axis=1)
    return ranks, starts, stops


def uncut_ends(length: int, rows: Sequence[Slices]) -> Integers:
    """Returns the boundaries of the shortest runs of positions that do not see each other in any row: 0, ..., N."""
    slices = np.concatenate([trim(row) for row in rows])
    starts, stops = np.minimum(slices[:, 0], slices[:, 2]), np.maximum(slices[:, 1], slices[:, 3])
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(np.append(0, stops[order]))
    free = starts >= reach[:-1]
    return np.unique(np.concatenate(([0, length], starts[free], reach[:-1][free], reach[-1:])))
