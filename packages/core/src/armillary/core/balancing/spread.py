"""Balanced layouts that send few bytes: each document is on as few neighbouring ranks of a ring as possible.

A document is a run of positions that sees nothing outside of it: a packed document, a tree, a chunk, or the sequence.

1. A document that fits into a rank's share of tokens and of pairs is not cut, so that nothing is sent for it.
2. A longer document is cut into pieces on consecutive ranks of the ring, so that its keys travel few hops. The piece of
   each rank is as large as the rank's room.
3. Each long document is then removed and assigned again, given all others, if ranks become more even. Late pieces of a
   document have more pairs per token than early ones, so a rank is even if it has pieces of both kinds.
4. Short documents fill the least loaded ranks.
5. If ranks are still uneven, steps 1 to 4 are repeated with each long document on more ranks.

Zigzag, contiguous and whole documents assigned by pairs are candidates too, so that the layout never sends more than
one of these that is even enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from armillary.core.balancing.traffic import PositionRuns, token_hops, uncut_ends
from armillary.core.balancing.work_density import Work, equal_ends
from armillary.core.slices import Integers, Slices, mirror

Floats = NDArray[np.float64]

EVEN = 1.10
"""Maximum load of a rank, in tokens and in pairs, relative to the mean, at which a layout counts as even."""
TRAFFIC = 1000.0
"""Pairs that take as long as sending one token over one hop, for 32 query heads and 8 key heads on GPUs with a network
of 400 Gb/s. Within a node the number is a tenth of that."""
STRETCHES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, 8.0)
"""Factors on the number of ranks of each long document, tried in this order until ranks are even (step 5)."""
PIECES = 16
"""Maximum number of pieces of cut documents per rank."""
SHORT_SHARE = 1 / 8
"""Documents below this fraction of a rank's share are short."""
BUNDLE_SHARE = 1 / 32
"""Adjacent short documents are assigned as one bundle of up to this fraction of a rank's share, for fewer spans."""
WHOLE_RING = 0.7
"""A document on at least this fraction of all ranks may be cut in zigzag over all of them."""
MINIMUM_ROOM = 0.02
"""Lower bound of a rank's room, in shares: the piece of a full rank is small, but not empty."""
PASSES = 3
"""Number of passes over the long documents: one that assigns them, and others that assign each again (step 3)."""
EVEN_LOAD = 1.02
"""Load of the most loaded rank, in shares, at which step 3 ends."""
WEIGHTS = (1.0, 0.5, 0.0)
"""Weights of pairs, relative to tokens, in the room of a rank. A document is cut with the best of these."""
GRID = 512
"""Number of positions per document at which pairs are counted exactly. Between these, cuts use interpolated counts."""


@dataclass(frozen=True)
class DocumentPieces:
    """The pieces of a cut document.

    Args:
        ends: boundaries, positions: [n + 1].
        owners: the rank of each piece: [n].
        sizes: tokens and pairs of each piece, in shares: [1 + sides, n].
    """

    ends: Integers
    owners: Integers
    sizes: Floats


@dataclass(frozen=True)
class SpreadCandidate:
    """A layout with its cost.

    Args:
        unevenness: load of the most loaded rank relative to the mean, in tokens or in pairs, whichever is larger.
        pairs: pairs of the rank with most of them.
    """

    segments: PositionRuns
    unevenness: float
    pairs: int
    ring: RingShares

    @cached_property
    def hops(self) -> int:
        """Token-hops of the rotating side: keys if ranks are even by queries, queries if by keys, or both."""
        by_side = self.ring.rows, [mirror(row) for row in self.ring.rows]
        return sum(token_hops(self.segments, self.ring.shards, by_side[side]) for side in self.ring.sides)


@dataclass(frozen=True)
class RingShares:
    """A sequence to distribute over a ring. A share is the mean number of tokens, or of pairs, per rank.

    Args:
        sides: how pairs are attributed to ranks: 0 to the rank of the query, 1 to the rank of the key.
        profiles: cache of `profile`.
    """

    length: int
    shards: int
    rows: Sequence[Slices]
    work: Work
    sides: tuple[int, ...] = (0,)
    profiles: dict[int, tuple[Integers, Floats]] = field(default_factory=dict[int, tuple[Integers, Floats]])

    @cached_property
    def ends(self) -> Integers:
        """Boundaries of documents."""
        return uncut_ends(self.length, self.rows)

    @cached_property
    def shares(self) -> Floats:
        """Mean tokens and pairs of a rank: [2]."""
        return np.array([self.length, max(1, self.work.total)]) / self.shards

    def before(self, positions: Integers) -> Floats:
        """Returns tokens and pairs by each side before each position [n], in shares: [1 + sides, n]."""
        return np.vstack((positions / self.shares[0], self.work.before(positions)[list(self.sides)] / self.shares[1]))

    @cached_property
    def measures(self) -> Floats:
        """Tokens and pairs before each boundary of documents, as `before` returns them."""
        return self.before(self.ends)

    def profile(self, document: int) -> tuple[Integers, Floats]:
        """Returns a grid of positions in a document, and the tokens and pairs of the document before each of them."""
        if document not in self.profiles:
            start, stop = self.ends[document : document + 2].tolist()
            grid = start + equal_ends(stop - start, min(stop - start, GRID))
            measures = self.before(grid)
            self.profiles[document] = grid, measures - measures[:, :1]
        return self.profiles[document]

    def candidate(self, segments: PositionRuns) -> SpreadCandidate:
        """Returns a layout with its cost; infinitely uneven if a shard is empty, which layouts do not allow."""
        pairs = np.zeros((len(self.sides), self.shards), np.int64)
        for side, before in zip(pairs, self.work.before(segments.ends)[list(self.sides)], strict=True):
            np.add.at(side, segments.owners, np.diff(before))
        tokens = np.bincount(segments.owners, np.diff(segments.ends), self.shards)
        worst = max(tokens.max() / self.shares[0], pairs.max() / self.shares[1]) if tokens.all() else np.inf
        return SpreadCandidate(segments, float(worst), int(pairs.max()), self)


def spread_spans(
    length: int, shards: int, rows: Sequence[Slices], work: Work, traffic: float, sides: tuple[int, ...] = (0,)
) -> list[list[range]] | None:
    """Returns the spans of the cheapest candidate with even ranks, or None if no candidate is even.

    Args:
        traffic: pairs that take as long as sending one token over one hop.
        sides: as in `RingShares`.
    """
    ring = RingShares(length, shards, rows, work, sides)
    uncut_assigner = DocumentAssigner(ring, 1.0, leave_room=False)
    if (uncut_assigner.ranks == 1).all():
        candidate = ring.candidate(uncut_assigner.assign(use_zigzag=False))
        if candidate.unevenness <= EVEN:
            return candidate.segments.spans(shards)  # no document is cut: nothing is sent
    # No candidate may send more than the best even reference layout.
    references = [_contiguous(ring), _zigzag(ring), _uncut_documents(ring)]
    candidates = [reference for reference in references if reference.unevenness <= EVEN]
    limit = min((reference.hops for reference in candidates), default=None)
    for leave_room in (False, True):
        for use_zigzag in (False, True):
            spread = _first_even(ring, leave_room, use_zigzag)
            candidates += [spread] if spread else []
    candidates = [candidate for candidate in candidates if limit is None or candidate.hops <= limit]
    best = min(candidates, key=lambda candidate: candidate.pairs + traffic * candidate.hops / shards, default=None)
    return best and best.segments.spans(shards)


def _first_even(ring: RingShares, leave_room: bool, use_zigzag: bool) -> SpreadCandidate | None:
    """Returns the first even candidate, with each document on as few ranks as possible: more ranks send more."""
    ranks, last_stretch = np.zeros(0), STRETCHES[0]
    for stretch in STRETCHES:
        assigner = DocumentAssigner(ring, stretch, leave_room)
        if assigner.ranks[assigner.ranks > 1].sum() > PIECES * ring.shards:
            break
        if np.array_equal(assigner.ranks, ranks) or (use_zigzag and not assigner.needs_whole_ring.any()):
            continue  # the same layout as for the previous stretch, or as without zigzag
        candidate = ring.candidate(assigner.assign(use_zigzag))
        if candidate.unevenness <= EVEN:
            # Ranks were uneven with the previous stretch. One between the two may be even and send less.
            halfway = DocumentAssigner(ring, (last_stretch + stretch) / 2, leave_room)
            if len(ranks) and not any(np.array_equal(halfway.ranks, each) for each in (ranks, assigner.ranks)):
                finer = ring.candidate(halfway.assign(use_zigzag))
                return finer if finer.unevenness <= EVEN else candidate
            return candidate
        ranks, last_stretch = assigner.ranks, stretch
    return None


class DocumentAssigner:
    """Assigns documents to the ranks of a ring, the largest first.

    Args:
        stretch: factor on the number of ranks of each long document.
        leave_room: True reserves room on every rank for the pairs of short documents. Otherwise a rank may be full in
            pairs when short documents are assigned, although it needs their tokens.
    """

    def __init__(self, ring: RingShares, stretch: float, leave_room: bool) -> None:
        self.ring, sizes = ring, np.diff(ring.measures)
        need = sizes.max(0)
        # Pairs per token of the short documents, both in shares; 0 for the tokens themselves.
        self.density = np.zeros((len(sizes), 1))
        if leave_room and (need < SHORT_SHARE).any():
            tokens, *pairs = sizes[:, need < SHORT_SHARE].sum(1)
            self.density[1:, 0] = np.array(pairs) / tokens
        self.measures = self._without_reserve(ring.measures)
        self.need = np.diff(self.measures).max(0)
        self.ranks = np.clip(np.ceil(stretch * self.need - 0.05), 1, ring.shards).astype(np.int64)
        self.needs_whole_ring = (self.ranks > 1) & (self.ranks >= WHOLE_RING * ring.shards)
        self.loads = np.zeros((len(sizes), ring.shards)) + self.density
        self.pieces = dict[int, DocumentPieces]()

    def _without_reserve(self, measures: Floats) -> Floats:
        """Returns tokens and pairs, less the pairs of short documents for which every rank has reserved room."""
        return measures - self.density * measures[0]

    def assign(self, use_zigzag: bool) -> PositionRuns:
        """Returns the layout.

        Args:
            use_zigzag: True cuts documents on almost all ranks in zigzag over all of them.
        """
        cut_documents = np.flatnonzero(self.ranks > 1)
        order = cut_documents[np.argsort(-self.need[cut_documents], kind="stable")].tolist()
        for document in order:
            in_zigzag = use_zigzag and self.needs_whole_ring[document]
            self._set_pieces(document, self._cut_in_zigzag(document) if in_zigzag else self._cut_along_ring(document))
        movable = [document for document in order if not (use_zigzag and self.needs_whole_ring[document])]
        for _ in range(PASSES - 1):
            # A list, because `any` of a generator would stop at the first document that moves.
            moved = [self._reassign(document) for document in movable if (self.loads > EVEN_LOAD).any()]
            if not any(moved):
                break
        bundle_starts, bundle_owners = self._fill(self.ranks == 1)
        starts = np.concatenate([*(pieces.ends[:-1] for pieces in self.pieces.values()), bundle_starts])
        owners = np.concatenate([*(pieces.owners for pieces in self.pieces.values()), bundle_owners])
        by_start = np.argsort(starts, kind="stable")
        return PositionRuns.of(np.append(starts[by_start], self.ring.length), owners[by_start])

    def _cut_in_zigzag(self, document: int) -> DocumentPieces:
        start, stop = self.ring.ends[document : document + 2].tolist()
        ranks = np.arange(self.ring.shards)
        ends, owners = start + equal_ends(stop - start, 2 * self.ring.shards), np.concatenate((ranks, ranks[::-1]))
        return self._pieces(ends, owners)

    def _pieces(self, ends: Integers, owners: Integers) -> DocumentPieces:
        nonempty = np.diff(ends) > 0  # a full rank's piece may have been rounded to no token
        ends, owners = np.append(ends[:-1][nonempty], ends[-1]), owners[nonempty]
        return DocumentPieces(ends, owners, np.diff(self._without_reserve(self.ring.before(ends))))

    def _set_pieces(self, document: int, pieces: DocumentPieces) -> None:
        self.pieces[document] = pieces
        self._add_loads(pieces, 1)

    def _add_loads(self, pieces: DocumentPieces, sign: int) -> None:
        for row, sizes in zip(self.loads, pieces.sizes, strict=True):
            np.add.at(row, pieces.owners, sign * sizes)

    def _reassign(self, document: int) -> bool:
        """Removes a document and assigns it again if ranks become more even. Returns True if it has moved."""
        previous = self.pieces[document]
        self._add_loads(previous, -1)
        pieces = self._cut_along_ring(document)
        gain = self._penalty_of(previous) - self._penalty_of(pieces)
        # The threshold is above rounding errors, which differ between machines; layouts must not.
        self._set_pieces(document, pieces if gain > 1e-6 else previous)
        return gain > 1e-6

    def _penalty_of(self, pieces: DocumentPieces) -> float:
        loads = self.loads[:, pieces.owners]
        return float(_penalty(loads + pieces.sizes, loads))

    def _cut_along_ring(self, document: int) -> DocumentPieces:
        """Cuts a document over consecutive ranks, starting at the rank that leaves the loads most even."""
        ranks, shards = int(self.ranks[document]), self.ring.shards
        grid, measures = self.ring.profile(document)
        tokens, pairs = measures[0], measures[1:].mean(0)
        # All combinations of a weight and a first rank are tried at once. Shapes: [weights, first rank, piece], with a
        # leading dim of kinds (tokens, pairs of each side) for loads and sizes.
        owners = (np.arange(shards)[:, None] + np.arange(ranks)) % shards
        loads = self.loads[:, owners]
        room = np.maximum(1 - loads, MINIMUM_ROOM)
        weights = np.array(WEIGHTS)[:, None, None]
        target = (1 - weights) * room[0] + weights * room[1:].mean(0)
        # Piece i ends where the document's cumulative work reaches the cumulative room of the first i ranks.
        room_before = target.cumsum(2)
        room_before /= room_before[:, :, -1:]
        ends = np.empty((len(WEIGHTS), shards, ranks + 1))
        ends[:, :, 0], ends[:, :, -1] = grid[0], grid[-1]
        for weight, weight_ends, target_share in zip(WEIGHTS, ends, room_before, strict=True):
            measure = (1 - weight) * tokens + weight * pairs
            weight_ends[:, 1:-1] = np.interp(target_share[:, :-1] * measure[-1], measure, grid)
        ends = np.rint(ends)
        sizes = np.stack([np.diff(np.interp(ends, grid, measure)) for measure in measures])
        sizes -= self.density[:, :, None, None] * sizes[0]
        penalty = _penalty(loads[:, None] + sizes, loads[:, None]).reshape(-1)
        # Rounded before the comparison, so that every machine chooses alike.
        best = int(np.rint(penalty * 2**32).argmin())
        best_ends = ends.reshape(-1, ranks + 1)[best].astype(np.int64)
        return self._pieces(best_ends, owners[best % shards])

    def _fill(self, uncut: NDArray[np.bool_]) -> tuple[Integers, Integers]:
        """Assigns uncut documents, adjacent short ones in bundles: the largest first, each to the least loaded rank.

        Returns:
            The starts and the owners of the bundles.
        """
        # A bundle ends at a cut document, and where cumulative tokens or pairs pass a multiple of BUNDLE_SHARE.
        bundle_numbers = np.floor(self.ring.measures[:, :-1] / BUNDLE_SHARE)
        starts_bundle = np.append(True, (np.diff(bundle_numbers) > 0).any(0))
        starts_bundle |= ~uncut
        starts_bundle[1:] |= ~uncut[:-1]
        bundles = np.flatnonzero(starts_bundle)
        bounds = np.append(bundles, len(uncut))
        bundles = np.flatnonzero(uncut[bundles])
        starts = self.ring.ends[bounds[bundles]]
        sizes = self.measures[:, bounds[bundles + 1]] - self.measures[:, bounds[bundles]]
        return starts, least_loaded(sizes, self.loads)


def _penalty(loads: Floats, previous_loads: Floats) -> Floats:
    """Returns the increase of the sum of loads^4 over ranks and kinds; the power penalizes the most loaded ranks."""
    square, square_before = loads * loads, previous_loads * previous_loads
    return (square * square - square_before * square_before).sum((0, -1))


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


def uncut_spans(length: int, shards: int, rows: Sequence[Slices]) -> list[list[range]]:
    """Returns the spans of each shard if no document is cut, each to the shard with the fewest pairs so far.

    Shards are empty if there are fewer documents than shards.
    """
    return _uncut_documents(RingShares(length, shards, rows, Work.of(rows))).segments.spans(shards)


def _uncut_documents(ring: RingShares) -> SpreadCandidate:
    pairs = np.diff(ring.measures)[1:]
    return ring.candidate(PositionRuns.of(ring.ends, least_loaded(pairs, np.zeros((len(ring.sides), ring.shards)))))
