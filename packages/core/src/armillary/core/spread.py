"""Balanced layouts that send few bytes: each document on as few neighbouring ranks of a ring as its length needs.

A document is a run of positions that sees nothing outside of it: a packed document, a tree, a chunk, or the sequence.
One that fits a rank's share of tokens and of pairs stays whole and sends nothing. A longer one is cut into pieces that
follow each other around the ring, so that its keys pass over few hops; each rank gets as much of it as it has room for.
Short documents then fill the ranks that have least. Where that leaves ranks uneven, all is tried again with each
document on more ranks. Zigzag, contiguous and documents dealt by pairs are candidates too, so the layout never sends
more than one of them that is even enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from armillary.core.slices import Integers, Slices
from armillary.core.traffic import PositionRuns, token_hops, uncut_ends
from armillary.core.work_density import Work, equal_ends

Floats = NDArray[np.float64]

EVEN = 1.10
"""Most loaded rank over the mean, in tokens and in pairs, up to which a layout counts as even."""
TRAFFIC = 1000.0
"""Pairs that take as long as sending one token over one hop: 32 query heads over 8 of keys on a GPU with a 400 Gb/s
network; ten times fewer within a node."""
STRETCHES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
"""Ranks of a document over those that it needs, tried until ranks are even."""
PIECES = 16
"""Cut documents have at most so many pieces for each rank."""
SAND = 1 / 8
"""Documents that need less than this of a rank's share fill the gaps that longer ones leave."""
BUNDLE = 1 / 32
"""Neighbouring short documents stay together up to this part of a rank's share: fewer spans, and fewer to deal."""
FULL_CIRCLE = 0.7
"""A document that needs more than this part of all ranks is dealt in zigzag over all of them."""
MINIMUM_ROOM = 0.02


@dataclass(frozen=True)
class SpreadCandidate:
    """A layout with what it costs.

    Args:
        unevenness: most loaded rank over the mean, the worse of tokens and pairs.
        pairs: of the most loaded rank.
    """

    segments: PositionRuns
    unevenness: float
    pairs: int
    ring: RingShares

    @cached_property
    def hops(self) -> int:
        return token_hops(self.segments, self.ring.shards, self.ring.rows)


@dataclass(frozen=True)
class RingShares:
    """A sequence to be laid over the ranks of a ring, and its shares: what each rank would have if all were even."""

    length: int
    shards: int
    rows: Sequence[Slices]
    work: Work

    @cached_property
    def ends(self) -> Integers:
        """Boundaries of documents."""
        return uncut_ends(self.length, self.rows)

    @cached_property
    def shares(self) -> Floats:
        """Tokens and pairs of a rank: [2]."""
        return np.array([self.length, max(1, self.work.total)]) / self.shards

    def before(self, positions: Integers) -> Floats:
        """Tokens and pairs before each position, in shares: [2, ...]."""
        pairs = self.work.before(positions.ravel())[0].reshape(positions.shape)
        return np.stack((positions / self.shares[0], pairs / self.shares[1]))

    def candidate(self, segments: PositionRuns) -> SpreadCandidate:
        pairs = np.zeros(self.shards, np.int64)
        np.add.at(pairs, segments.owners, np.diff(self.work.before(segments.ends)[0]))
        tokens = np.bincount(segments.owners, np.diff(segments.ends), self.shards)
        # A shard without tokens is no shard: never even.
        worst = max(tokens.max() / self.shares[0], pairs.max() / self.shares[1]) if tokens.all() else np.inf
        return SpreadCandidate(segments, float(worst), int(pairs.max()), self)


def spread_spans(
    length: int, shards: int, rows: Sequence[Slices], work: Work, traffic: float
) -> list[list[range]] | None:
    """Spans of the cheapest candidate with even ranks, or None if there is none.

    Args:
        traffic: pairs that take as long as sending one token over one hop.
    """
    ring = RingShares(length, shards, rows, work)
    whole = Dealer(ring, 1.0, leave_room=False)
    if (whole.ranks == 1).all():
        candidate = ring.candidate(whole.deal(full_circle=False))
        if candidate.unevenness <= EVEN:
            return candidate.segments.spans(shards)  # sends nothing
    references = [_contiguous(ring), _zigzag(ring), _dealt_by_pairs(ring)]
    even = [reference for reference in references if reference.unevenness <= EVEN]
    limit = min((reference.hops for reference in even), default=None)
    for leave_room in (False, True):
        for full_circle in (False, True):
            spread = _first_even(ring, leave_room, full_circle)
            if spread and (limit is None or spread.hops <= limit):
                even.append(spread)
    even = [candidate for candidate in even if limit is None or candidate.hops <= limit]
    best = min(even, key=lambda candidate: candidate.pairs + traffic * candidate.hops / shards, default=None)
    return best and best.segments.spans(shards)


def _first_even(ring: RingShares, leave_room: bool, full_circle: bool) -> SpreadCandidate | None:
    """The even candidate with each document on as few ranks as possible: on more of them it sends more."""
    ranks = np.zeros(0)
    for stretch in STRETCHES:
        dealer = Dealer(ring, stretch, leave_room)
        cut = dealer.ranks[dealer.ranks > 1]
        if cut.sum() > PIECES * ring.shards:
            break
        if np.array_equal(dealer.ranks, ranks) or (full_circle and not dealer.in_full_circle.any()):
            continue  # the same layout as before, or as without
        ranks = dealer.ranks
        candidate = ring.candidate(dealer.deal(full_circle))
        if candidate.unevenness <= EVEN:
            return candidate
    return None


class Dealer:
    """Deals documents to the ranks of a ring, those that need most first.

    Args:
        stretch: ranks of a document over those that it needs.
        leave_room: count for every rank the pairs of the short documents that will fill it, before they are dealt: a
            rank full of pairs but not of tokens has no room for them.
    """

    def __init__(self, ring: RingShares, stretch: float, leave_room: bool) -> None:
        self.ring, before = ring, ring.before(ring.ends)
        need = np.diff(before).max(0)
        self.density = 0.0  # pairs of the filling, for each token, both in shares
        if leave_room and (need < SAND).any():
            tokens, pairs = np.diff(before)[:, need < SAND].sum(1)
            self.density = pairs / tokens
        self.measured = self._measure(ring.ends)
        self.need = np.diff(self.measured).max(0)
        self.ranks = np.clip(np.ceil(stretch * self.need - 0.05), 1, ring.shards).astype(np.int64)
        self.in_full_circle = (self.ranks > 1) & (self.ranks >= FULL_CIRCLE * ring.shards)
        self.loads = np.zeros((2, ring.shards))
        self.loads[1] = self.density
        self.pieces = list[tuple[Integers, Integers]]()  # starts and owners

    def _measure(self, positions: Integers) -> Floats:
        measured = self.ring.before(positions)
        measured[1] -= self.density * measured[0]
        return measured

    def deal(self, full_circle: bool) -> PositionRuns:
        """Returns the layout.

        Args:
            full_circle: deal documents that need almost all ranks in zigzag.
        """
        cut = np.flatnonzero(self.ranks > 1)
        for document in cut[np.argsort(-self.need[cut], kind="stable")].tolist():
            start, stop = self.ring.ends[document : document + 2].tolist()
            ranks = int(self.ranks[document])
            if full_circle and self.in_full_circle[document]:
                self._zigzag(start, stop)
            else:
                self._along_the_ring(start, stop, ranks)
        self._fill(self.ranks == 1)
        starts, owners = (np.concatenate(arrays) for arrays in zip(*self.pieces, strict=True))
        order = np.argsort(starts, kind="stable")
        return PositionRuns.of(np.append(starts[order], self.ring.length), owners[order])

    def _zigzag(self, start: int, stop: int) -> None:
        ends, ranks = start + equal_ends(stop - start, 2 * self.ring.shards), np.arange(self.ring.shards)
        self._give(ends, np.concatenate((ranks, ranks[::-1])))

    def _give(self, ends: Integers, owners: Integers) -> None:
        some = np.diff(ends) > 0
        for row, pieces in zip(self.loads, np.diff(self._measure(ends)), strict=True):
            np.add.at(row, owners, pieces)
        self.pieces.append((ends[:-1][some], owners[some]))

    def _along_the_ring(self, start: int, stop: int, ranks: int) -> None:
        """Cuts a document over `ranks` neighbours, from that rank on which the loads then are least uneven."""
        size = stop - start
        grid = start + equal_ends(size, min(size, 64 * ranks))
        tokens, pairs = self.ring.before(grid) - self.ring.before(grid[:1])
        owners = (np.arange(self.ring.shards)[:, None] + np.arange(ranks)) % self.ring.shards
        loads = self.loads[:, owners]
        room = np.maximum(1 - loads, MINIMUM_ROOM)
        best = None
        for weight in (1.0, 0.5, 0.0):  # cut by pairs, by both, by tokens
            measure, wanted = (1 - weight) * tokens + weight * pairs, (1 - weight) * room[0] + weight * room[1]
            upto = np.concatenate((np.zeros((len(owners), 1)), wanted.cumsum(1)), axis=1)
            ends = np.rint(np.interp(upto / upto[:, -1:] * measure[-1], measure, grid)).astype(np.int64)
            ends[:, 0], ends[:, -1] = start, stop
            after = loads + np.diff(self._measure(ends))
            # The fourth power weighs the most loaded ranks most. Rounded, so that every machine finds the same minimum.
            square, square_before = after * after, loads * loads
            penalty = (square * square - square_before * square_before).sum((0, 2))
            first = int(np.rint(penalty * 2**32).argmin())
            if best is None or np.rint(penalty[first] * 2**32) < best[0]:
                best = np.rint(penalty[first] * 2**32), ends[first], owners[first]
        assert best is not None
        self._give(best[1], best[2])

    def _fill(self, chosen: NDArray[np.bool_]) -> None:
        """Deals whole documents, neighbouring short ones together: the largest first, each to the least loaded rank."""
        part = np.floor(self.ring.before(self.ring.ends)[:, :-1] / BUNDLE)
        begins = np.append(True, (np.diff(part) > 0).any(0))
        begins |= ~chosen
        begins[1:] |= ~chosen[:-1]
        bundles = np.flatnonzero(begins)
        bounds = np.append(bundles, len(chosen))
        bundles = np.flatnonzero(chosen[bundles])
        starts = self.ring.ends[bounds[bundles]]
        sizes = self.measured[:, bounds[bundles + 1]] - self.measured[:, bounds[bundles]]
        self.pieces.append((starts, least_loaded(sizes, self.loads)))


def least_loaded(sizes: Floats, loads: Floats) -> Integers:
    """The rank of each item: the largest first, each to the rank whose greatest load is least.

    Args:
        sizes: of n items, in each of m kinds of load: [m, n].
        loads: of ranks, before: [m, ranks].
    """
    owners, totals = np.zeros(sizes.shape[1], np.int64), loads.T.tolist()
    heap = [(max(load), rank) for rank, load in enumerate(totals)]
    heapq.heapify(heap)
    items = sizes.T.tolist()
    for item in np.argsort(-sizes.max(0), kind="stable").tolist():
        rank = heap[0][1]
        totals[rank] = [load + size for load, size in zip(totals[rank], items[item], strict=True)]
        owners[item] = rank
        heapq.heapreplace(heap, (max(totals[rank]), rank))
    return owners


def _contiguous(ring: RingShares) -> SpreadCandidate:
    return ring.candidate(PositionRuns.of(equal_ends(ring.length, ring.shards), np.arange(ring.shards)))


def _zigzag(ring: RingShares) -> SpreadCandidate:
    ranks = np.arange(ring.shards)
    ends = equal_ends(ring.length, 2 * ring.shards)
    return ring.candidate(PositionRuns.of(ends, np.concatenate((ranks, ranks[::-1]))))


def _dealt_by_pairs(ring: RingShares) -> SpreadCandidate:
    pairs = np.diff(ring.before(ring.ends))[1:]
    return ring.candidate(PositionRuns.of(ring.ends, least_loaded(pairs, np.zeros((1, ring.shards)))))
