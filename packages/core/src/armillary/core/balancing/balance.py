"""Balanced layouts: the same attention work on every shard, in few spans.

Under a causal mask late queries see more keys, which zigzag balances: shard r holds chunks r and 2 P - 1 - r. Under
other masks it does not: a query in packed documents sees only its own document, and a prompt with many answers is seen
by all of them. So the sequence is cut into equal chunks, a few per shard, whose visible (query, key) pairs are counted
in closed form. Each shard gets equally many chunks, assigned so that the most loaded shard is close to the mean. If a
few chunks have most of the pairs, these are cut again, into as many smaller chunks. Two counts are balanced: the pairs
of a shard's queries (its work when keys rotate), and the pairs of its keys (its work when queries rotate).
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
"""Maximum load relative to the mean that is even enough: then no more chunks are tried."""
GAIN = 0.01
"""Minimum improvement of that ratio for which more chunks are accepted."""
DENSE = 2
"""Chunks with more than this multiple of the mean number of pairs are cut again."""


@dataclass(frozen=True)
class Division:
    """The spans of each shard in rising order, and the pairs of the most loaded shard over the mean."""

    spans: list[list[range]]
    unevenness: float

    @property
    def longest(self) -> int:
        """Largest number of spans on one shard."""
        return max(map(len, self.spans), default=0)

    def worse_than(self, unevenness: float, longest: int) -> bool:
        """Returns True if a division with this unevenness, and `longest` spans on one shard, is better.

        If both are even enough, fewer spans are better; otherwise lower unevenness is, by at least `GAIN`.
        """
        if max(unevenness, self.unevenness) <= GOAL:
            return longest < self.longest
        return unevenness < self.unevenness - (GAIN if unevenness > GOAL else 0)


def balanced_spans(
    length: int, shards: int, rows: Sequence[Slices], traffic: float, sides: tuple[int, ...] = (0,)
) -> list[list[range]]:
    """Returns the spans of each shard, in rising order.

    Args:
        traffic: pairs that take as long as sending one token over one hop; 0 ignores traffic.
        sides: pairs to even out if traffic counts, as in `RingShares`; otherwise both.

    Raises:
        ValueError: the number of pairs overflows 64 bits.
    """
    if length**2 * len(rows) >= 2**63:
        raise ValueError(f"{length} tokens in {len(rows)} rows: pairs are counted up to 2^63; give fewer")
    work = Work.of(rows)
    spans = spread_spans(length, shards, rows, work, traffic, sides) if traffic and shards > 1 else None
    return spans or evenest_spans(length, shards, work)


def evenest_spans(length: int, shards: int, work: Work) -> list[list[range]]:
    """Returns the division in the fewest spans that reaches `GOAL`, or else the most even one."""
    all_tokens = TokenRuns(np.array([0]), np.array([length]))
    mean, best = work.total / shards, Division([], float("inf"))
    for chunks_per_shard in CHUNKS:
        if (chunks_per_shard > 1 and shards * chunks_per_shard > length) or (
            best.unevenness <= GOAL and best.longest <= chunks_per_shard
        ):
            break
        finer = split_by_density(all_tokens, shards * chunks_per_shard, work, DENSE * mean / chunks_per_shard)
        # First equal chunks of the whole sequence, then with its dense parts cut finer.
        for token_runs in ([all_tokens], finer)[: len(finer)]:
            chunks = Chunks.of(token_runs, shards, chunks_per_shard, work)
            if best.worse_than(imbalance(chunks.largest, mean), chunks_per_shard * len(token_runs)):
                division = chunks.distribute(mean)
                best = division if best.worse_than(division.unevenness, division.longest) else best
    return best.spans


@dataclass(frozen=True)
class Chunks:
    """Some token runs, each cut into equal chunks, the same number of chunks for every shard.

    Args:
        pairs: pairs of each chunk, of its queries and of its keys: [2, n].
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
        return int(self.pairs.max())

    def distribute(self, mean: float) -> Division:
        """Returns the division over shards; their sizes differ by at most one."""
        kinds = np.repeat(np.arange(len(self.runs)), self.pairs.shape[1] // len(self.runs))
        owners = distribute(self.pairs, kinds, self.shards, max(GOAL * mean, self.largest))
        spans, loads = [list[range]() for _ in range(self.shards)], np.zeros((self.shards, 2), dtype=np.int64)
        for runs, owner in zip(self.runs, owners.reshape(len(self.runs), -1), strict=True):
            ends = ends_for(runs.size, owner, self.shards)
            np.add.at(loads, owner, runs.pairs(ends, self.work).T)
            for chunk, shard in enumerate(owner.tolist()):
                spans[shard] += runs.spans(*ends[chunk : chunk + 2].tolist())
        sorted_spans = [sorted(shard, key=lambda span: span.start) for shard in spans]
        return Division(sorted_spans, imbalance(int(loads.max()), mean))


def imbalance(largest: int, mean: float) -> float:
    """Returns the ratio of the largest load to the mean; 1 if there is no load at all."""
    return largest / mean if mean else 1.0


def ends_for(size: int, owner: Integers, shards: int) -> Integers:
    """Returns boundaries of chunks. Sizes of chunks differ by at most one, and so do total sizes of owners."""
    base, remainder = divmod(size, len(owner))
    # Number of chunks of each shard that have one token more.
    longer = [remainder // shards + (shard < remainder % shards) for shard in range(shards)]
    sizes = np.full(len(owner), base)
    for shard in range(shards) if remainder else ():
        sizes[np.flatnonzero(owner == shard)[: longer[shard]]] += 1
    return np.concatenate(([0], np.cumsum(sizes)))
