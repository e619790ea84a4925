"""Balanced layouts that send few bytes: each document on as few neighbouring ranks of a ring as its length needs.

A document is a run of positions that sees nothing outside of it: a packed document, a tree, a chunk, or the sequence.

1. A document within a rank's share of tokens and of pairs is not cut, and sends nothing.
2. A longer document is cut into pieces on consecutive ranks of the ring, so that its keys travel few hops; each rank
   gets as much of it as it has room for.
3. Short documents then fill the least loaded ranks.
4. If ranks are still uneven, steps 1 to 3 are repeated with each document on more ranks.

Zigzag, contiguous and whole documents assigned by pairs are candidates too, so that the layout never sends more than
one of these that is even enough.
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
"""Maximum load of a rank, in tokens and in pairs, relative to the mean, at which a layout counts as even."""
TRAFFIC = 1000.0
"""Pairs that take as long as sending one token over one hop, for 32 query heads and 8 key heads on GPUs with a network
of 400 Gb/s. Within a node the number is a tenth of that."""
STRETCHES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
"""Factors on the number of ranks that a document needs, tried in this order until ranks are even."""
PIECES = 16
"""Maximum number of pieces of cut documents per rank."""
SHORT = 1 / 8
"""Documents below this fraction of a rank's share fill the gaps that longer ones leave."""
BUNDLE = 1 / 32
"""Adjacent short documents are assigned together, up to this fraction of a rank's share, for fewer spans."""
FULL_CIRCLE = 0.7
"""A document that needs at least this fraction of all ranks may be cut in zigzag over all ranks."""
MINIMUM_ROOM = 0.02
"""Minimum room of a rank, in shares, so that a full rank still gets a piece of positive size."""


@dataclass(frozen=True)
class SpreadCandidate:
    """A layout with its cost.

    Args:
        unevenness: the most loaded rank over the mean: the larger ratio of those for tokens and for pairs.
        pairs: pairs of the most loaded rank.
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
    """A sequence to distribute over a ring. A share is the mean number of tokens, or of pairs, per rank."""

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
        """Mean tokens and pairs of a rank: [2]."""
        return np.array([self.length, max(1, self.work.total)]) / self.shards

    def before(self, positions: Integers) -> Floats:
        """Returns tokens and pairs before each position, in shares: [2, ...]."""
        pairs = self.work.before(positions.ravel())[0].reshape(positions.shape)
        return np.stack((positions / self.shares[0], pairs / self.shares[1]))

    def candidate(self, segments: PositionRuns) -> SpreadCandidate:
        pairs = np.zeros(self.shards, np.int64)
        np.add.at(pairs, segments.owners, np.diff(self.work.before(segments.ends)[0]))
        tokens = np.bincount(segments.owners, np.diff(segments.ends), self.shards)
        # Every shard needs a token.
        worst = max(tokens.max() / self.shares[0], pairs.max() / self.shares[1]) if tokens.all() else np.inf
        return SpreadCandidate(segments, float(worst), int(pairs.max()), self)


def spread_spans(
    length: int, shards: int, rows: Sequence[Slices], work: Work, traffic: float
) -> list[list[range]] | None:
    """Returns the spans of the cheapest candidate with even ranks, or None if no candidate is even.

    Args:
        traffic: pairs that take as long as sending one token over one hop.
    """
    ring = RingShares(length, shards, rows, work)
    uncut_dealer = Dealer(ring, 1.0, leave_room=False)
    if (uncut_dealer.ranks == 1).all():
        candidate = ring.candidate(uncut_dealer.deal(full_circle=False))
        if candidate.unevenness <= EVEN:
            return candidate.segments.spans(shards)  # no document is cut: nothing is sent
    # Traffic of the best even reference layout is the limit for candidates of `Dealer`.
    references = [_contiguous(ring), _zigzag(ring), _whole_documents(ring)]
    candidates = [reference for reference in references if reference.unevenness <= EVEN]
    limit = min((reference.hops for reference in candidates), default=None)
    for leave_room in (False, True):
        for full_circle in (False, True):
            spread = _first_even(ring, leave_room, full_circle)
            if spread and (limit is None or spread.hops <= limit):
                candidates.append(spread)
    candidates = [candidate for candidate in candidates if limit is None or candidate.hops <= limit]
    best = min(candidates, key=lambda candidate: candidate.pairs + traffic * candidate.hops / shards, default=None)
    return best and best.segments.spans(shards)


def _first_even(ring: RingShares, leave_room: bool, full_circle: bool) -> SpreadCandidate | None:
    """Returns the first even candidate, with each document on as few ranks as possible: more ranks send more."""
    ranks = np.zeros(0)
    for stretch in STRETCHES:
        dealer = Dealer(ring, stretch, leave_room)
        cut_ranks = dealer.ranks[dealer.ranks > 1]
        if cut_ranks.sum() > PIECES * ring.shards:
            break
        if np.array_equal(dealer.ranks, ranks) or (full_circle and not dealer.in_full_circle.any()):
            continue  # the same layout as for the previous stretch, or as without a full circle
        ranks = dealer.ranks
        candidate = ring.candidate(dealer.deal(full_circle))
        if candidate.unevenness <= EVEN:
            return candidate
    return None


class Dealer:
    """Assigns documents to the ranks of a ring, the largest first.

    Args:
        stretch: factor on the number of ranks that a document needs.
        leave_room: True counts the pairs of short documents as load of every rank from the start. Otherwise a rank may
            be full of pairs, but not of tokens, before short documents are assigned.
    """

    def __init__(self, ring: RingShares, stretch: float, leave_room: bool) -> None:
        self.ring, before = ring, ring.before(ring.ends)
        need = np.diff(before).max(0)
        self.density = 0.0  # pairs per token of the short documents, both in shares
        if leave_room and (need < SHORT).any():
            tokens, pairs = np.diff(before)[:, need < SHORT].sum(1)
            self.density = pairs / tokens
        self.measures = self._measure(ring.ends)
        self.need = np.diff(self.measures).max(0)
        self.ranks = np.clip(np.ceil(stretch * self.need - 0.05), 1, ring.shards).astype(np.int64)
        self.in_full_circle = (self.ranks > 1) & (self.ranks >= FULL_CIRCLE * ring.shards)
        self.loads = np.zeros((2, ring.shards))
        self.loads[1] = self.density
        self.pieces = list[tuple[Integers, Integers]]()  # starts and owners

    def _measure(self, positions: Integers) -> Floats:
        measures = self.ring.before(positions)
        measures[1] -= self.density * measures[0]
        return measures

    def deal(self, full_circle: bool) -> PositionRuns:
        """Returns the layout.

        Args:
            full_circle: True cuts documents that need almost all ranks in zigzag over all ranks.
        """
        cut_documents = np.flatnonzero(self.ranks > 1)
        for document in cut_documents[np.argsort(-self.need[cut_documents], kind="stable")].tolist():
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
        self._assign(ends, np.concatenate((ranks, ranks[::-1])))

    def _assign(self, ends: Integers, owners: Integers) -> None:
        nonempty = np.diff(ends) > 0
        for row, pieces in zip(self.loads, np.diff(self._measure(ends)), strict=True):
            np.add.at(row, owners, pieces)
        self.pieces.append((ends[:-1][nonempty], owners[nonempty]))

    def _along_the_ring(self, start: int, stop: int, ranks: int) -> None:
        """Cuts a document over `ranks` consecutive ranks, starting at the rank that leaves the loads most even."""
        size = stop - start
        grid = start + equal_ends(size, min(size, 64 * ranks))
        tokens, pairs = self.ring.before(grid) - self.ring.before(grid[:1])
        owners = (np.arange(self.ring.shards)[:, None] + np.arange(ranks)) % self.ring.shards  # by first rank
        loads = self.loads[:, owners]
        room = np.maximum(1 - loads, MINIMUM_ROOM)
        best = None
        for weight in (1.0, 0.5, 0.0):  # cut by pairs, by both, by tokens
            measure, target = (1 - weight) * tokens + weight * pairs, (1 - weight) * room[0] + weight * room[1]
            # Piece i ends where the document's cumulative work reaches the cumulative room of the first i ranks.
            room_before = np.concatenate((np.zeros((len(owners), 1)), target.cumsum(1)), axis=1)
            work_before = room_before / room_before[:, -1:] * measure[-1]
            ends = np.rint(np.interp(work_before, measure, grid)).astype(np.int64)
            ends[:, 0], ends[:, -1] = start, stop
            new_loads = loads + np.diff(self._measure(ends))
            # The fourth power penalizes the most loaded ranks. Rounded, so that every machine finds the same minimum.
            square, square_before = new_loads * new_loads, loads * loads
            penalty = (square * square - square_before * square_before).sum((0, 2))
            first = int(np.rint(penalty * 2**32).argmin())
            if best is None or np.rint(penalty[first] * 2**32) < best[0]:
                best = np.rint(penalty[first] * 2**32), ends[first], owners[first]
        assert best is not None
        self._assign(best[1], best[2])

    def _fill(self, uncut: NDArray[np.bool_]) -> None:
        """Assigns uncut documents, adjacent short ones in bundles: the largest first, each to the least loaded rank."""
        bundle_numbers = np.floor(self.ring.before(self.ring.ends)[:, :-1] / BUNDLE)
        starts_bundle = np.append(True, (np.diff(bundle_numbers) > 0).any(0))
        starts_bundle |= ~uncut
        starts_bundle[1:] |= ~uncut[:-1]
        bundles = np.flatnonzero(starts_bundle)
        bounds = np.append(bundles, len(uncut))
        bundles = np.flatnonzero(uncut[bundles])
        starts = self.ring.ends[bounds[bundles]]
        sizes = self.measures[:, bounds[bundles + 1]] - self.measures[:, bounds[bundles]]
        self.pieces.append((starts, least_loaded(sizes, self.loads)))


def least_loaded(sizes: Floats, loads: Floats) -> Integers:
    """Returns the rank of each item: the largest item first, to the rank whose largest load is lowest.

    Args:
        sizes: [m, n], loads of n items in m kinds.
        loads: [m, ranks], initial loads of the ranks.
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


def _whole_documents(ring: RingShares) -> SpreadCandidate:
    pairs = np.diff(ring.before(ring.ends))[1:]
    return ring.candidate(PositionRuns.of(ring.ends, least_loaded(pairs, np.zeros((1, ring.shards)))))
