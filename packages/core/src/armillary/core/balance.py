"""Balanced layouts: the same work on every rank of a ring, each document on few neighbouring ranks.

In this module a document is a run of positions that sees nothing outside of it: a packed document, a tree, a chunk of
a chunked mask, or the whole sequence. A rank's share is the mean over all ranks: of tokens, and of (query, key) pairs.
A rank's load is its tokens and its pairs, both in shares; its room is 1 minus its load.

1. Documents of at most about one share of tokens and of pairs are not cut: nothing is sent for them.
2. Longer documents are cut into pieces on consecutive ranks of the ring, in proportion to their room.
3. Uncut documents are assigned to the least loaded ranks.
4. Ends of pieces move, so that ranks above the limit have fewer tokens of a document and the ranks beside them more.
5. If loads are still uneven, steps 1 to 4 are repeated with more ranks for each document, so shorter ones are cut too.

A layout that sends many more bytes than zigzag is computed again, as uneven as the limit allows (`tight`): then fewer
tokens of a document have later pieces.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from armillary.core.layout_cost import Floats, LayoutWithCost, PositionRuns, RingShares, equal_ends
from armillary.core.slices import Integers, Slices

EVEN = 1.10
"""A layout is even if no rank has more than this load, in tokens and in pairs."""
STEP = 0.05
"""Step by which this limit widens if no layout is even: up to the most even layout, but at least once."""
WORTHWHILE = 0.6
"""Less even layouts may send at most this fraction of the bytes of the most even layout, if that one is even."""
ZIGZAG_BYTES = 1.5
"""A layout that is more even than zigzag may send this many times its bytes, or more if that costs less time."""
SEND_COST = 1000.0
"""Default cost of sending one token to the next rank, as the number of (query, key) pairs that take as long to compute.
For 32 query heads and 8 key heads, on GPUs with a network of 400 Gb/s. Within a node the number is a tenth of that."""
STATE_TOKENS = 512
"""Tokens whose k and v take as many bytes as the state and the map that a layer with a state sends where a document is
cut: with 16 heads of 128 x 128 in float32, and 8 key heads of 128 in bfloat16."""
STRETCHES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, 8.0)
"""Factors on the number of ranks of each long document, tried in this order until the layout is even (step 5)."""
PIECES = 16
"""Maximum number of pieces of cut documents, on average over ranks."""
SHORT_SHARE = 1 / 8
"""Documents below this many shares, in tokens and in pairs, are short."""
BUNDLE_SHARE = 1 / 32
"""Adjacent uncut documents that begin within this many shares are one bundle, so that layouts have fewer spans."""
WHOLE_RING = 0.7
"""A document that needs at least this fraction of all ranks may be cut in zigzag over all ranks."""
MINIMUM_ROOM = 0.02
"""Minimum room of a rank, in shares: a full rank also gets a piece, a small one."""
SHIFTED_LOAD, TIGHT_LOAD = 1.07, 1.095
"""Loads above which step 4 moves ends of pieces: some lie between ranks that are both too full. Under `tight` it fills
ranks up to the second, which is below `EVEN` because pairs are interpolated."""
SHIFTS = 10
"""Maximum number of passes of step 4 over all ends of pieces."""
WEIGHTS = (1.0, 0.5, 0.0)
"""The work that sets the size of a rank's piece is w * pairs + (1 - w) * tokens. A document is cut with the best w."""


class DocumentPieces(NamedTuple):
    """The pieces of a cut document.

    Args:
        ends: boundaries of the pieces, as positions: [n + 1].
        owners: the rank that gets each piece: [n].
        sizes: tokens and pairs of each piece in shares, pairs less those reserved (`DocumentAssigner`): [1 + sides, n].
    """

    ends: Integers
    owners: Integers
    sizes: Floats


def balanced_spans(
    length: int,
    shards: int,
    rows: Sequence[Slices],
    send_cost: float,
    sides: tuple[int, ...] = (0,),
    state_tokens: int = 0,
) -> list[list[range]]:
    """Returns each shard's spans, in rising order: without cuts if that is even, else the cheapest even layout.

    Args:
        send_cost: as in `SequenceLayout.balanced`; 0 returns the most even layout, by both counts of pairs.
        sides, state_tokens: as in `RingShares`.
    """
    if length**2 * len(rows) >= 2**63:
        raise ValueError(f"{length} tokens in {len(rows)} rows: pairs are counted up to 2^63; give fewer")
    ring = RingShares(length, shards, rows, sides, state_tokens)
    if not send_cost or shards == 1:
        return even_layout(ring).spans(shards)
    uncut_assigner = DocumentAssigner(ring, 1.0, leave_room=False)
    if (uncut_assigner.ranks == 1).all():
        candidate = ring.candidate(uncut_assigner.assign(use_zigzag=False))
        if candidate.unevenness <= EVEN:
            return candidate.layout.spans(shards)  # no document is cut: nothing is sent
    ranks = np.arange(shards)
    contiguous = PositionRuns.of(equal_ends(length, shards), ranks)
    zigzag = PositionRuns.of(equal_ends(length, 2 * shards), np.concatenate((ranks, ranks[::-1])))
    simple = [ring.candidate(layout) for layout in (contiguous, zigzag, uncut_documents(ring))]
    most_bytes = ZIGZAG_BYTES * simple[1].hops
    searched = _searched(ring, tight=False)
    if not any(each.unevenness <= EVEN and each.hops <= most_bytes for each in (*simple, *searched)):
        searched += _searched(ring, tight=True)
    cheap = [each for each in (*simple, *searched) if each.unevenness < np.inf and each.hops <= most_bytes]
    tolerance = EVEN
    if all(each.unevenness > EVEN for each in (*simple, *searched)):
        # No layout is even: the tolerance widens by `STEP` until a layout is within it that sends few enough bytes
        # (`WORTHWHILE`), or else up to the most even layout.
        most_even = ring.candidate(even_layout(ring))
        # If this one is even, the others must send a good deal less than it does.
        ceiling = WORTHWHILE * most_even.hops if most_even.unevenness <= EVEN else np.inf
        simple, searched = ([each for each in layouts if each.hops <= ceiling] for layouts in (simple, searched))
        least = min((each.unevenness for each in (*simple, *searched)), default=np.inf)
        highest = max(EVEN + STEP, most_even.unevenness)
        while tolerance < min(least, highest):
            tolerance = min(tolerance + STEP, highest)
        simple.append(most_even)
    candidates = [each for each in (*simple, *searched) if each.unevenness <= tolerance]
    # The result must not send more than a simple layout within the tolerance.
    most_hops = min((each.hops for each in simple if each.unevenness <= tolerance), default=np.inf)
    candidates = [each for each in candidates if each.hops <= most_hops]
    if all(each.hops > most_bytes for each in candidates):
        candidates += cheap  # balance must be worth its bytes: these, such as zigzag, are less even and send fewer
    # Cost in pairs: those of the slowest rank, and the sends of an average rank.
    best = min(candidates, key=lambda each: each.pairs + send_cost * each.hops / shards)
    return best.layout.spans(shards)


def uncut_spans(length: int, shards: int, rows: Sequence[Slices]) -> list[list[range]]:
    """Returns the spans of each shard if no document is cut. With fewer documents than shards some are empty."""
    return uncut_documents(RingShares(length, shards, rows)).spans(shards)


def uncut_documents(ring: RingShares) -> PositionRuns:
    pairs = np.diff(ring.measures)[1:]
    return PositionRuns.of(ring.ends, least_loaded(pairs, np.zeros((len(ring.sides), ring.shards))))


def _searched(ring: RingShares, tight: bool) -> list[LayoutWithCost]:
    """Returns the layouts of all searches, even or not. For `tight` see `DocumentAssigner.assign`."""
    return [
        candidate
        for leave_room in (False, True)
        for use_zigzag in (False, True)
        for candidate in _stretched(ring, leave_room, use_zigzag, tight)
    ]


def _stretched(ring: RingShares, leave_room: bool, use_zigzag: bool, tight: bool) -> Iterator[LayoutWithCost]:
    # A document on more ranks sends more, so the first even stretch is the last one tried. If pieces are filled up to
    # the limit, more ranks may also be ones with more room.
    ranks, folds, last_stretch = np.zeros(0), 1, STRETCHES[0]
    for stretch in STRETCHES:
        assigner = DocumentAssigner(ring, stretch, leave_room)
        if assigner.ranks[assigner.ranks > 1].sum() > PIECES * ring.shards:
            break
        if use_zigzag and not assigner.needs_whole_ring.any():
            continue  # the layout would be that without zigzag
        if np.array_equal(assigner.ranks, ranks) and not (use_zigzag and assigner.folds > folds):
            continue  # the layout would be that of the previous stretch
        candidate = ring.candidate(assigner.assign(use_zigzag, tight))
        yield candidate
        if candidate.unevenness <= EVEN and not tight:
            # The previous stretch gave an uneven layout. A stretch between the two may be even and send less.
            halfway = DocumentAssigner(ring, (last_stretch + stretch) / 2, leave_room)
            if len(ranks) and not any(np.array_equal(halfway.ranks, each) for each in (ranks, assigner.ranks)):
                yield ring.candidate(halfway.assign(use_zigzag))
            break
        ranks, folds, last_stretch = assigner.ranks, assigner.folds, stretch


class DocumentAssigner:
    """Assigns documents to the ranks of a ring, the largest first: steps 2 to 4.

    Args:
        stretch: factor on the number of ranks of each long document.
        leave_room: True reserves room on every rank for the pairs of short documents. Otherwise a rank may be full in
            pairs when short documents are assigned, although it needs their tokens.
    """

    def __init__(self, ring: RingShares, stretch: float, leave_room: bool) -> None:
        self.ring, sizes = ring, np.diff(ring.measures)
        is_short = sizes.max(0) < SHORT_SHARE
        # Pairs per token of the short documents, both in shares: [1 + sides, 1]. 0 in the row of tokens.
        self.density = np.zeros((len(sizes), 1))
        # To reserve room, each rank starts as if all of its tokens were those of short documents: its load in pairs is
        # their density.
        if leave_room and is_short.any():
            tokens, *pairs = sizes[:, is_short].sum(1)
            self.density[1:, 0] = np.array(pairs) / tokens
        self.measures = self._without_reserve(ring.measures)
        self.need = np.diff(self.measures).max(0)  # shares that each document needs
        # A document up to 0.05 shares too large for a number of ranks does not get one more.
        self.ranks = np.clip(np.ceil(stretch * self.need - 0.05), 1, ring.shards).astype(np.int64)
        self.needs_whole_ring = (self.ranks > 1) & (self.ranks >= WHOLE_RING * ring.shards)
        self.folds = 1 if stretch < 2 else 2  # zigzags of a document that is cut over all ranks
        self.loads = np.zeros((len(sizes), ring.shards)) + self.density  # of each rank: [1 + sides, ranks]

    def _without_reserve(self, measures: Floats) -> Floats:
        # A piece adds only the pairs that exceed its tokens times the density of short documents.
        return measures - self.density * measures[0]

    def assign(self, use_zigzag: bool, tight: bool = False) -> PositionRuns:
        """Returns the layout.

        Args:
            use_zigzag: True cuts documents that need almost all ranks in zigzag over all ranks.
            tight: True fills the last piece of each document up to `TIGHT_LOAD`, then the piece before it, and so on:
                the keys that travel are those of earlier pieces. If queries travel, it starts with the first piece.
        """
        # Step 2: cut long documents, the largest first. On consecutive ranks their keys travel few hops.
        cut_documents = np.flatnonzero(self.ranks > 1)
        order = cut_documents[np.argsort(-self.need[cut_documents], kind="stable")].tolist()
        movable, pieces = list[int](), dict[int, DocumentPieces]()
        for document in order:
            in_zigzag = use_zigzag and self.needs_whole_ring[document]
            pieces[document] = self._cut_in_zigzag(document) if in_zigzag else self._cut_along_ring(document)
            for row, sizes in zip(self.loads, pieces[document].sizes, strict=True):
                np.add.at(row, pieces[document].owners, sizes)
            movable += [] if in_zigzag else [document]
        # Step 3: documents that are not cut.
        bundle_starts, bundle_owners = self._fill(self.ranks == 1)
        owners = np.concatenate([*(each.owners for each in pieces.values()), bundle_owners])

        def layout(ends: Iterable[Sequence[int] | Integers]) -> PositionRuns:
            starts = np.concatenate([*(each[:-1] for each in ends), bundle_starts])
            by_start = np.argsort(starts, kind="stable")
            return PositionRuns.of(np.append(starts[by_start], self.ring.length), owners[by_start])

        # Step 4: loads are exact only now that all documents are assigned.
        unshifted = layout(each.ends for each in pieces.values())
        loads = self.ring.loads(unshifted)
        if loads.max() <= SHIFTED_LOAD and not tight:
            return unshifted
        return layout(self._shifted_ends(pieces, loads.T.tolist(), set(movable) if tight else None))

    def _shifted_ends(
        self, pieces: dict[int, DocumentPieces], loads: list[list[float]], tight: set[int] | None
    ) -> list[list[int]]:
        """Returns the ends of each document's pieces, moved until no load exceeds the limit, if possible.

        Args:
            loads: tokens and pairs of each rank, in shares: [ranks, 1 + sides]. Changed in place.
            tight: the documents whose pieces are filled as in `assign`; None without `tight`.
        """
        limit = SHIFTED_LOAD if tight is None else TIGHT_LOAD
        # Python's floats: each calculation is for one end, and all machines round alike.
        profiles = {document: [each.tolist() for each in self.ring.profile(document)] for document in pieces}
        moved_ends = {document: each.ends.tolist() for document, each in pieces.items()}
        for shift in range(SHIFTS):
            has_moved = False
            for document, ends in moved_ends.items():
                grid, measures = profiles[document]
                owners = pieces[document].owners.tolist()
                for i in range(1, len(owners))[:: 1 - 2 * (shift % 2)]:  # every other pass goes backwards
                    border = Border(grid, measures, ends[i], loads[owners[i - 1]], loads[owners[i]], limit)
                    low, high = border.limits(ends[i - 1], ends[i + 1])
                    if low > high:
                        target = high + bisect(range(high, low), 0.0, key=border.pressure)
                    elif tight and document in tight and self.ring.sides != (0, 1):
                        target = high if self.ring.sides == (1,) else low
                    else:
                        target = min(max(ends[i], low), high)
                    if target != ends[i]:
                        border.move(target)
                        ends[i], has_moved = target, True
            if not has_moved:
                break
        return list(moved_ends.values())

    def _pieces(self, ends: Integers, owners: Integers) -> DocumentPieces:
        nonempty = np.diff(ends) > 0  # the piece of a full rank may have been rounded to no token
        ends, owners = np.append(ends[:-1][nonempty], ends[-1]), owners[nonempty]
        return DocumentPieces(ends, owners, np.diff(self._without_reserve(self.ring.before(ends))))

    def _cut_in_zigzag(self, document: int) -> DocumentPieces:
        start, stop = self.ring.ends[document : document + 2].tolist()
        ranks = np.arange(self.ring.shards)
        owners = np.tile(np.concatenate((ranks, ranks[::-1])), self.folds)
        return self._pieces(start + equal_ends(stop - start, len(owners)), owners)

    def _cut_along_ring(self, document: int) -> DocumentPieces:
        """Cuts a document over consecutive ranks, starting at the rank that leaves the loads most even."""
        # All combinations of a weight (of `WEIGHTS`) and a first rank are tried at once. Shapes are [weights, first
        # ranks, pieces]; loads and sizes have a leading dim for tokens and the pairs of each side.
        ranks, shards = int(self.ranks[document]), self.ring.shards
        grid, measures = self.ring.profile(document)
        tokens, pairs = measures[0], measures[1:].mean(0)
        # 1. The room of each rank that would get a piece: [weights, first ranks, pieces].
        owners = (np.arange(shards)[:, None] + np.arange(ranks)) % shards
        loads = self.loads[:, owners]
        room_by_kind = np.maximum(1 - loads, MINIMUM_ROOM)
        weights = np.array(WEIGHTS)[:, None, None]
        room = (1 - weights) * room_by_kind[0] + weights * room_by_kind[1:].mean(0)
        # 2. Piece i ends at the position where the document's cumulative work, as a fraction of all of its work, is the
        # room of its first i ranks, as a fraction of the room of all of its ranks.
        fractions = room.cumsum(2)
        fractions /= fractions[:, :, -1:]
        ends = np.empty((len(WEIGHTS), shards, ranks + 1))
        ends[:, :, 0], ends[:, :, -1] = grid[0], grid[-1]
        for weight, weight_ends, weight_fractions in zip(WEIGHTS, ends, fractions, strict=True):
            work = (1 - weight) * tokens + weight * pairs
            weight_ends[:, 1:-1] = np.interp(weight_fractions[:, :-1] * work[-1], work, grid)
        ends = np.rint(ends)
        # 3. Keep the combination with the smallest penalty; penalties are rounded, so that all machines keep the same.
        sizes = np.stack([np.diff(np.interp(ends, grid, measure)) for measure in measures])
        sizes -= self.density[:, :, None, None] * sizes[0]
        penalty = _penalty(loads[:, None] + sizes, loads[:, None]).reshape(-1)
        best = int(np.rint(penalty * 2**32).argmin())
        best_ends = ends.reshape(-1, ranks + 1)[best].astype(np.int64)
        return self._pieces(best_ends, owners[best % shards])

    def _fill(self, uncut: NDArray[np.bool_]) -> tuple[Integers, Integers]:
        """Assigns the documents of the mask `uncut` (step 3). Returns (start, rank) of each bundle of adjacent ones."""
        # A bundle ends at a cut document, and at the first document that begins beyond the next multiple of
        # BUNDLE_SHARE, in cumulative tokens or pairs.
        bundle_numbers = np.floor(self.ring.measures[:, :-1] / BUNDLE_SHARE)
        starts_bundle = np.append(True, (np.diff(bundle_numbers) > 0).any(0))
        starts_bundle |= ~uncut
        starts_bundle[1:] |= ~uncut[:-1]
        first_documents = np.flatnonzero(starts_bundle)
        bounds = np.append(first_documents, len(uncut))
        bundles = np.flatnonzero(uncut[first_documents])  # the others are cut documents, which are already assigned
        starts = self.ring.ends[bounds[bundles]]
        sizes = self.measures[:, bounds[bundles + 1]] - self.measures[:, bounds[bundles]]
        return starts, least_loaded(sizes, self.loads)


class Border:
    """The end of one piece of a document and the start of the next, on another rank.

    Args:
        grid, measures: as `RingShares.profile`.
        end: the position of the border.
        before, after: the loads of the ranks of both pieces, in shares: [1 + sides]. `move` changes them.
        limit: the load above which a rank is too full.
    """

    def __init__(
        self,
        grid: list[int],
        measures: list[list[float]],
        end: int,
        before: list[float],
        after: list[float],
        limit: float,
    ) -> None:
        self.grid, self.measures, self.before, self.after, self.limit = grid, measures, before, after, limit
        self.sizes = [interpolated(end, grid, measure) for measure in measures]

    def limits(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the lowest end at which the rank of the piece after it is not too full, and the highest end at which
        the rank of the piece before it is not; both from `start` to `stop`."""
        low, high = float(start), float(stop)
        for measure, size, before, after in zip(self.measures, self.sizes, self.before, self.after, strict=True):
            low = max(low, interpolated(size + after - self.limit, measure, self.grid))
            high = min(high, interpolated(size + self.limit - before, measure, self.grid))
        return min(ceil(low - 1e-6), stop), max(floor(high + 1e-6), start)

    def pressure(self, end: int) -> float:
        """Returns the derivative, by the end, of the sum of squares of both ranks' excess over the limit."""
        total = 0.0
        for measure, size, before, after in zip(self.measures, self.sizes, self.before, self.after, strict=True):
            new_size = interpolated(end, self.grid, measure)
            excess_before = max(0.0, before + new_size - size - self.limit)
            excess_after = max(0.0, after - new_size + size - self.limit)
            total += (interpolated(end + 1, self.grid, measure) - new_size) * (excess_before - excess_after)
        return total

    def move(self, end: int) -> None:
        for i, (measure, size) in enumerate(zip(self.measures, self.sizes, strict=True)):
            moved = interpolated(end, self.grid, measure) - size
            self.before[i] += moved
            self.after[i] -= moved


def interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """As `np.interp`, for one x: the y of the line through the points (xs, ys); where xs are equal, the last one's."""
    i = bisect(xs, x)
    if not 0 < i < len(xs):
        return ys[0] if i == 0 else ys[-1]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def _penalty(loads: Floats, previous_loads: Floats) -> Floats:
    # The increase of the sum of load^4 over tokens, pairs and ranks. The power penalizes high loads most.
    square, square_before = loads * loads, previous_loads * previous_loads
    return (square * square - square_before * square_before).sum((0, -1))


def least_loaded(sizes: Floats, loads: Floats) -> Integers:
    """Returns the rank of each of n items, whose sizes [m, n] add to `loads` [m, ranks]: the largest item first."""
    # A load is the largest of m measures: tokens, and pairs of each side. Each item goes to the lowest one.
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


# -- the most even layout, whatever it sends --------------------------------------------------------------------------

CHUNKS = (1, 2, 4, 8, 16)
"""Chunks per shard, tried in this order: more chunks balance better, but make more spans."""
GOAL = 1.02
"""Maximum load of a shard, relative to the mean, at which the search stops."""
GAIN = 0.01
"""Minimum improvement of the maximum load for which a layout in more chunks is accepted."""
DENSE = 2
"""Chunks with more than `DENSE` times the mean number of pairs per chunk are cut again."""
MAX_GROUPS = 4
"""Maximum number of groups of tokens by density: each group but the last is cut into larger chunks than the next."""
PARTNERS = 8
"""Number of least loaded shards that are tried first as partners of the most loaded one."""


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

    def pieces(self, ends: Integers) -> tuple[Integers, Integers, Integers]:
        """Returns (first position, last position + 1, i) of pieces with tokens of numbers ends[i] to ends[i + 1]."""
        numbers = np.unique(np.concatenate((ends, self.offsets)))
        run = np.searchsorted(self.offsets, numbers[:-1], side="right") - 1
        starts = self.starts[run] + numbers[:-1] - self.offsets[run]
        return starts, starts + np.diff(numbers), np.searchsorted(ends, numbers[:-1], side="right") - 1

    def pairs(self, ends: Integers, ring: RingShares) -> Integers:
        starts, stops, chunk = self.pieces(ends)
        pairs = np.zeros((2, len(ends) - 1), np.int64)
        for side, sizes in zip(pairs, ring.pairs_before(stops) - ring.pairs_before(starts), strict=True):
            np.add.at(side, chunk, sizes.astype(np.int64))
        return pairs


def even_layout(ring: RingShares) -> PositionRuns:
    """Returns the layout that reaches `GOAL` in the fewest spans, or else the most even one, whatever it sends.

    Both counts of pairs are balanced, by queries and by keys. Shards have equally many tokens, give or take one.
    """
    # Under a causal mask late queries see more keys. Zigzag balances that: shard r holds chunks r and 2 P - 1 - r of 2
    # P. Zigzag is uneven under other masks: in packed documents a query sees only its own document, and all answers to
    # a prompt see the prompt. All counts are integers, so that ranks that compute a layout independently get the same
    # one.
    length, shards, mean = ring.length, ring.shards, float(ring.shares[1])
    all_tokens = TokenRuns(np.array([0]), np.array([length]))
    best, best_load, best_spans = PositionRuns(np.array([0, length]), np.array([0])), float("inf"), 0

    def is_better(load: float, spans: int) -> bool:
        if max(load, best_load) <= GOAL:
            return spans < best_spans
        return load < best_load - (GAIN if load > GOAL else 0)

    for chunks_per_shard in CHUNKS:
        # 1. Cut the sequence into equal chunks, a few per shard.
        count = shards * chunks_per_shard
        # Stop if the best layout is even enough and more chunks per shard would not make fewer spans.
        if (chunks_per_shard > 1 and count > length) or (best_load <= GOAL and best_spans <= chunks_per_shard):
            break
        density_groups = split_by_density(all_tokens, count, ring, DENSE * mean / chunks_per_shard)
        # 2. First equal chunks of the whole sequence are distributed; then, if a few have most of the pairs, equal
        # chunks of each density group: those of dense tokens are smaller.
        for groups in [[all_tokens], density_groups] if len(density_groups) > 1 else [[all_tokens]]:
            pairs = np.concatenate([group.pairs(equal_ends(group.size, count), ring) for group in groups], axis=1)
            # One shard has the largest chunk, so its pairs are a lower bound of the maximum load. Distribute the chunks
            # only if a layout with this load would be better.
            largest = int(pairs.max())
            if not is_better(largest / mean, chunks_per_shard * len(groups)):
                continue
            # A shard gets equally many chunks of each group. Some chunks may be one token longer: now that their shards
            # are known, the ends of chunks are moved so that each shard has equally many longer ones, give or take one.
            kinds = np.repeat(np.arange(len(groups)), count)
            owners = distribute(pairs, kinds, shards, max(GOAL * mean, largest)).reshape(len(groups), count)
            pieces = [
                group.pieces(ends_for(group.size, owner, shards)) for group, owner in zip(groups, owners, strict=True)
            ]
            starts = np.concatenate([starts for starts, _, _ in pieces])
            owner_of_piece = np.concatenate([owner[chunk] for owner, (_, _, chunk) in zip(owners, pieces, strict=True)])
            order = np.argsort(starts, kind="stable")
            layout = PositionRuns.of(np.append(starts[order], length), owner_of_piece[order])
            load = int(ring.pairs_of_shards(layout).max()) / mean
            spans = int(np.bincount(owner_of_piece).max())
            if is_better(load, spans):
                best, best_load, best_spans = layout, load, spans
    return best


def split_by_density(runs: TokenRuns, chunks: int, ring: RingShares, limit: float) -> list[TokenRuns]:
    """Splits tokens into groups of rising density (pairs per token); `chunks` divides the size of all but the first."""
    groups = list[TokenRuns]()
    # Chunks with at most `limit` pairs form a group. The tokens of all others are cut again, into smaller chunks, so
    # that fewer exceed the limit.
    while len(groups) < MAX_GROUPS - 1:
        ends = equal_ends(runs.size, chunks)
        dense = runs.pairs(ends, ring).max(0) > limit
        # Consecutive dense chunks are one run of tokens, from `cuts[2 i]` to `cuts[2 i + 1]`.
        cuts = ends[np.flatnonzero(np.diff(np.concatenate(([False], dense, [False])).astype(np.int64)))]
        # Neighbouring tokens are added until the number of dense tokens is divisible by `chunks`: on the right of the
        # last run, or, if the sequence ends there, on the left of the first one.
        padding = -int((cuts[1::2] - cuts[::2]).sum()) % chunks
        if padding and cuts[-1] + padding <= runs.size:
            cuts[-1] += padding
        elif padding:
            cuts[0] -= min(padding, cuts[0])
        dense_size = int((cuts[1::2] - cuts[::2]).sum())
        if dense_size % chunks or not 0 < dense_size <= runs.size - chunks:
            break  # too few neighbours, no dense chunk, or the sparse tokens would not suffice for `chunks` chunks
        starts, stops, number = runs.pieces(np.concatenate(([0], cuts, [runs.size])))
        is_dense = number % 2 == 1
        groups.append(TokenRuns(starts[~is_dense], stops[~is_dense]))
        runs = TokenRuns(starts[is_dense], stops[is_dense])
    return [*groups, runs]


def distribute(work: Integers, kinds: Integers, shards: int, goal: float) -> Integers:
    """Returns the shard of each piece [n]. Every shard gets equally many pieces of every kind.

    Args:
        work: pairs of n pieces, by their queries and by their keys: [2, n]. The load of a shard is the larger sum.
        kinds: the kind of each piece, numbered from 0; the number of pieces of each kind is divisible by `shards`.
        goal: load of the most loaded shard at which swaps end.
    """
    # room[k, s]: number of pieces of kind k that shard s still takes.
    room = np.repeat(np.bincount(kinds)[:, None] // shards, shards, axis=1)
    owner, loads = np.empty_like(kinds), np.zeros((2, shards), dtype=np.int64)
    never = np.iinfo(np.int64).max
    # Greedy: the largest piece first, each to the shard whose load is lowest with the piece.
    for piece in np.argsort(-work.sum(0), kind="stable"):
        peaks = (loads + work[:, piece, None]).max(0)
        shard = np.where(room[kinds[piece]] > 0, peaks, never).argmin()
        owner[piece] = shard
        room[kinds[piece], shard] -= 1
        loads[:, shard] += work[:, piece]
    # Then swap pieces of the most loaded shard, until the goal is reached or no swap helps.
    while (peak := loads.max()) > goal:
        side, heavy = np.unravel_index(loads.argmax(), loads.shape)
        partners_by_load = np.argsort(loads[side], kind="stable")
        partners_by_load = partners_by_load[partners_by_load != heavy]
        # A swap with one of the least loaded shards usually helps; the others are tried only if it does not.
        for partners in (partners_by_load[:PARTNERS], partners_by_load[PARTNERS:]):
            heavy_pieces, partner_pieces = np.flatnonzero(owner == heavy), np.flatnonzero(np.isin(owner, partners))
            # Change of the heavy shard's loads for each pair of pieces: [2, heavy pieces, partner pieces]. The loads of
            # the partner change by the opposite.
            change = work[:, None, partner_pieces] - work[:, heavy_pieces, None]
            new_peaks = np.maximum(
                loads[:, heavy, None, None] + change, loads[:, None, owner[partner_pieces]] - change
            ).max(0)
            # Only pieces of the same kind may be swapped: the others get a peak that does not count as lower.
            new_peaks[kinds[heavy_pieces, None] != kinds[partner_pieces]] = peak
            if new_peaks.min(initial=peak) < peak:
                a, b = np.unravel_index(new_peaks.argmin(), new_peaks.shape)
                piece, other_piece = heavy_pieces[a], partner_pieces[b]
                loads[:, heavy] += change[:, a, b]
                loads[:, owner[other_piece]] -= change[:, a, b]
                owner[piece], owner[other_piece] = owner[other_piece], heavy
                break
        else:
            break  # no swap lowers the peak
    return owner


def ends_for(size: int, owner: Integers, shards: int) -> Integers:
    """Returns the boundaries [n + 1] of chunks with owners [n]. Sizes differ by at most one, of shards too."""
    base, remainder = divmod(size, len(owner))
    # `remainder` chunks have one token more than the others: spread these evenly over the shards.
    longer = [remainder // shards + (shard < remainder % shards) for shard in range(shards)]
    sizes = np.full(len(owner), base)
    for shard, count in enumerate(longer):
        sizes[np.flatnonzero(owner == shard)[:count]] += 1
    return np.concatenate(([0], np.cumsum(sizes)))
