"""Balanced layouts: the same attention work on every shard, in few spans.

Under a causal mask late queries see more keys. Zigzag balances that: shard r holds chunks r and 2 P - 1 - r of 2 P.
Zigzag is uneven under other masks: in packed documents a query sees only its own document, and all answers to a prompt
see the prompt. `balanced_spans` therefore searches:

1. Cut the sequence into equal chunks, a few per shard, and count the visible (query, key) pairs of each.
2. Give each shard equally many chunks, so that the most loaded shard is close to the mean (`partition.distribute`).
3. If a few chunks have most of the pairs, cut these again into smaller chunks, and repeat step 2.

Pairs are counted twice, and both counts are balanced: the pairs of a shard's queries are its work when keys rotate, the
pairs of its keys are its work when queries rotate. This search ignores bytes; `spread.spread_spans`, which is tried
first, weighs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from armillary.core.balancing.partition import distribute
from armillary.core.balancing.spread import spread_spans
from armillary.core.balancing.work_density import TokenRuns, Work, equal_ends, split_by_density
from armillary.core.slices import Integers, Slices

CHUNKS = (1, 2, 4, 8, 16)
"""Chunks per shard, tried in this order: more chunks balance better, but make more spans."""
GOAL = 1.02
"""Maximum load of a shard, relative to the mean, at which the search stops."""
GAIN = 0.01
"""Minimum improvement of the maximum load for which a layout in more chunks is accepted."""
DENSE = 2
"""Chunks with more than `DENSE` times the mean number of pairs per chunk are cut again."""


@dataclass(frozen=True)
class Division:
    """A layout as a candidate of the search.

    Args:
        spans: spans of each shard, in rising order.
        unevenness: pairs of the most loaded shard over the mean of all shards.
    """

    spans: list[list[range]]
    unevenness: float

    @property
    def longest(self) -> int:
        """Largest number of spans on one shard."""
        return max(map(len, self.spans), default=0)

    def worse_than(self, unevenness: float, longest: int) -> bool:
        """Returns True if another division, of this unevenness and with `longest` spans on one shard, is better.

        If both reach `GOAL`, the one with fewer spans is better. Otherwise the more even one is; if the other division
        does not reach `GOAL`, it must be more even by `GAIN`.
        """
        if max(unevenness, self.unevenness) <= GOAL:
            return longest < self.longest
        return unevenness < self.unevenness - (GAIN if unevenness > GOAL else 0)


def balanced_spans(
    length: int, shards: int, rows: Sequence[Slices], send_cost: float, sides: tuple[int, ...] = (0,)
) -> list[list[range]]:
    """Returns the spans of each shard, in rising order.

    Args:
        send_cost: as in `SequenceLayout.balanced`.
        sides: the counts of pairs to balance, as in `RingShares`. If sending costs nothing, both are balanced.

    Raises:
        ValueError: the number of pairs overflows 64 bits.
    """
    if length**2 * len(rows) >= 2**63:
        raise ValueError(f"{length} tokens in {len(rows)} rows: pairs are counted up to 2^63; give fewer")
    work = Work.of(rows)
    spans = spread_spans(length, shards, rows, work, send_cost, sides) if send_cost and shards > 1 else None
    return spans or evenest_spans(length, shards, work)


def evenest_spans(length: int, shards: int, work: Work) -> list[list[range]]:
    """Returns the spans of the division that reaches `GOAL` in the fewest spans, or else of the most even one."""
    all_tokens = TokenRuns(np.array([0]), np.array([length]))
    mean, best = work.total / shards, Division([], float("inf"))
    for chunks_per_shard in CHUNKS:
        too_many_chunks = chunks_per_shard > 1 and shards * chunks_per_shard > length
        if too_many_chunks or (best.unevenness <= GOAL and best.longest <= chunks_per_shard):
            break
        groups = split_by_density(all_tokens, shards * chunks_per_shard, work, DENSE * mean / chunks_per_shard)
        # First equal chunks of the whole sequence; then, if some are dense, equal chunks of each group by density.
        for token_runs in ([all_tokens], groups)[: len(groups)]:
            chunks = Chunks.of(token_runs, shards, chunks_per_shard, work)
            # No shard can have less than the largest chunk. Only if that would be better are the chunks distributed.
            if best.worse_than(imbalance(chunks.largest, mean), chunks_per_shard * len(token_runs)):
                division = chunks.distribute(mean)
                best = division if best.worse_than(division.unevenness, division.longest) else best
    return best.spans


@dataclass(frozen=True)
class Chunks:
    """Chunks to be distributed over shards.

    Args:
        runs: groups of tokens. Each is cut into equally many chunks, a multiple of `shards`, whose sizes differ by at
            most one token.
        pairs: pairs of each chunk's queries and of its keys: [2, chunks].
    """

    runs: list[TokenRuns]
    shards: int
    work: Work
    pairs: Integers

    @classmethod
    def of(cls, token_runs: list[TokenRuns], shards: int, chunks_per_shard: int, work: Work) -> Chunks:
        pairs = [runs.pairs(equal_ends(runs.size, shards * chunks_per_shard), work) for runs in token_runs]
        return cls(token_runs, shards, work, np.concatenate(pairs, axis=1))

    @property
    def largest(self) -> int:
        """Pairs of the largest chunk, by either count."""
        return int(self.pairs.max())

    def distribute(self, mean: float) -> Division:
        """Returns the division over shards, whose numbers of tokens differ by at most one.

        Args:
            mean: mean number of pairs per shard.
        """
        # Every shard gets equally many chunks of each group. Chunks of a group are the same kind for `distribute`.
        kinds = np.repeat(np.arange(len(self.runs)), self.pairs.shape[1] // len(self.runs))
        owners = distribute(self.pairs, kinds, self.shards, max(GOAL * mean, self.largest))
        spans, loads = [list[range]() for _ in range(self.shards)], np.zeros((self.shards, 2), dtype=np.int64)
        for runs, owner in zip(self.runs, owners.reshape(len(self.runs), -1), strict=True):
            # If chunks cannot all have the same size, move their ends so that shards still have equal sizes.
            ends = ends_for(runs.size, owner, self.shards)
            np.add.at(loads, owner, runs.pairs(ends, self.work).T)
            for chunk, shard in enumerate(owner.tolist()):
                spans[shard] += runs.spans(*ends[chunk : chunk + 2].tolist())
        sorted_spans = [sorted(shard, key=lambda span: span.start) for shard in spans]
        return Division(sorted_spans, imbalance(int(loads.max()), mean))


def imbalance(largest: int, mean: float) -> float:
    """Returns the ratio of the largest load to the mean load; 1 if all loads are 0."""
    return largest / mean if mean else 1.0


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
    for shard in range(shards) if remainder else ():
        sizes[np.flatnonzero(owner == shard)[: longer[shard]]] += 1
    return np.concatenate(([0], np.cumsum(sizes)))
