"""The most even layout: the same work on every shard in few spans, whatever it sends.

Under a causal mask late queries see more keys. Zigzag balances that: shard r holds chunks r and 2 P - 1 - r of 2 P.
Zigzag is uneven under other masks: in packed documents a query sees only its own document, and all answers to a prompt
see the prompt. `even_layout` finds chunks for any mask:

1. Cut the sequence into equal chunks, a few per shard, and count the visible (query, key) pairs of each.
2. Give each shard equally many chunks, so that the most loaded shard is close to the mean (`distribute`).
3. If a few chunks have most of the pairs, cut these again into smaller chunks, and repeat step 2.

Both counts of pairs are balanced, by queries and by keys. All counts are integers, so that ranks that compute a layout
independently get the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from armillary.core.balancing.cost import PositionRuns, RingShares, equal_ends
from armillary.core.slices import Integers

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
        """Cuts the tokens at the numbers `ends`, from 0 to `size`, and at the ends of runs.

        Returns:
            arrays (first position, last position + 1, i) of pieces with tokens of the numbers ends[i] to ends[i + 1].
        """
        numbers = np.unique(np.concatenate((ends, self.offsets)))
        run = np.searchsorted(self.offsets, numbers[:-1], side="right") - 1
        starts = self.starts[run] + numbers[:-1] - self.offsets[run]
        return starts, starts + np.diff(numbers), np.searchsorted(ends, numbers[:-1], side="right") - 1

    def pairs(self, ends: Integers, ring: RingShares) -> Integers:
        """Returns the pairs of the tokens between consecutive `ends`, from 0 to `size` [n + 1]: [2, n]."""
        starts, stops, chunk = self.pieces(ends)
        pairs = np.zeros((2, len(ends) - 1), np.int64)
        for side, sizes in zip(pairs, ring.pairs_before(stops) - ring.pairs_before(starts), strict=True):
            np.add.at(side, chunk, sizes.astype(np.int64))
        return pairs


def even_layout(ring: RingShares) -> PositionRuns:
    """Returns the layout that reaches `GOAL` in the fewest spans, or else the most even one.

    Shards have equally many tokens, give or take one.
    """
    length, shards, mean = ring.length, ring.shards, float(ring.shares[1])
    all_tokens = TokenRuns(np.array([0]), np.array([length]))
    best, best_load, best_spans = PositionRuns(np.array([0, length]), np.array([0])), float("inf"), 0

    def is_better(load: float, spans: int) -> bool:
        """Compares a layout with the best one, by the load of its most loaded shard and its most spans of a shard."""
        if max(load, best_load) <= GOAL:
            return spans < best_spans
        return load < best_load - (GAIN if load > GOAL else 0)

    for chunks_per_shard in CHUNKS:
        count = shards * chunks_per_shard
        # Stop if the best layout is even enough and more chunks per shard would not make fewer spans.
        if (chunks_per_shard > 1 and count > length) or (best_load <= GOAL and best_spans <= chunks_per_shard):
            break
        density_groups = split_by_density(all_tokens, count, ring, DENSE * mean / chunks_per_shard)
        # First equal chunks of the whole sequence; then, if some are dense, equal chunks of each density group.
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
    """Splits tokens into groups of rising density (pairs per token), of which a caller cuts each into `chunks` chunks.

    1. Cut the tokens into `chunks` chunks. The chunks with at most `limit` pairs form a group.
    2. Repeat with the tokens of all other chunks: their new chunks are smaller, so that fewer exceed `limit`.

    The number of tokens in every group except the first is divisible by `chunks`.
    """
    groups = list[TokenRuns]()
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
    """Returns the shard of each piece: [n]. Every shard gets equally many pieces of every kind.

    Greedy: the largest piece first, each to the shard whose load is lowest with the piece. Then pieces are swapped
    between the most loaded shard and another, until the goal is reached or no swap helps.

    Args:
        work: pairs of n pieces, by their queries and by their keys: [2, n]. The load of a shard is the larger sum.
        kinds: the kind of each piece, numbered from 0; the number of pieces of each kind is divisible by `shards`.
        goal: load of the most loaded shard at which swaps end.
    """
    # room[k, s]: number of pieces of kind k that shard s still takes.
    room = np.repeat(np.bincount(kinds)[:, None] // shards, shards, axis=1)
    owner, loads = np.empty_like(kinds), np.zeros((2, shards), dtype=np.int64)
    never = np.iinfo(np.int64).max
    for piece in np.argsort(-work.sum(0), kind="stable"):
        peaks = (loads + work[:, piece, None]).max(0)
        shard = np.where(room[kinds[piece]] > 0, peaks, never).argmin()
        owner[piece] = shard
        room[kinds[piece], shard] -= 1
        loads[:, shard] += work[:, piece]
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
    """Returns the boundaries of chunks of `size` tokens: [n + 1].

    Sizes of chunks differ by at most one token, and so do sizes of shards.

    Args:
        owner: the shard of each chunk: [n].
    """
    base, remainder = divmod(size, len(owner))
    # `remainder` chunks have one token more than the others: spread these evenly over the shards.
    longer = [remainder // shards + (shard < remainder % shards) for shard in range(shards)]
    sizes = np.full(len(owner), base)
    for shard, count in enumerate(longer):
        sizes[np.flatnonzero(owner == shard)[:count]] += 1
    return np.concatenate(([0], np.cumsum(sizes)))
