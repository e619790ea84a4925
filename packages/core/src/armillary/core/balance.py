"""Spreading a sequence over shards so that each has as much attention to compute, in few spans.

Under a causal mask late queries see more keys, and zigzag evens that out: shard r holds chunks r and 2 P - 1 - r. Under
other masks it no longer does: with documents in a row a query sees no more than its own, and a prompt with many answers
is seen by all of them. So the sequence is cut in equal chunks, a few for each shard, whose visible (query, key) pairs
are counted in closed form; each shard gets equally many chunks, and such ones that the most loaded shard has little
more than the mean. Where pairs lie so densely that few chunks have most of them, those are taken together and cut
again, into as many chunks that are smaller. Two counts are kept even: the pairs of a shard's queries, which it computes
where keys travel, and those of its keys, which it computes where queries do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from armillary.core.partition import shared_out
from armillary.core.slices import Integers, Slices
from armillary.core.spread import spread_spans
from armillary.core.work_density import TokenRuns, Work, by_density, equal_ends

CHUNKS = (1, 2, 4, 8, 16)
"""Chunks for each shard, to be tried in turn: more of them balance better, and make more spans."""
GOAL = 1.02
"""Slowest over mean that no more chunks are tried for."""
GAIN = 0.01
"""What more chunks must take off the slowest over mean to be worth it."""
DENSE = 2
"""Chunks with more than so many times what all have in the mean are cut again."""


@dataclass(frozen=True)
class Division:
    """The spans of each shard, in rising order, and the slowest shard's pairs over the mean."""

    spans: list[list[range]]
    unevenness: float

    @property
    def longest(self) -> int:
        """Spans of the shard that has most."""
        return max(map(len, self.spans), default=0)

    def worse_than(self, unevenness: float, longest: int) -> bool:
        """Of two that are even enough, the one in more spans; otherwise more of them must bring something."""
        if max(unevenness, self.unevenness) <= GOAL:
            return longest < self.longest
        return unevenness < self.unevenness - (GAIN if unevenness > GOAL else 0)


def balanced_spans(length: int, shards: int, rows: Sequence[Slices], traffic: float) -> list[list[range]]:
    """The spans of each shard, in rising order.

    Args:
        traffic: pairs that take as long as sending one token over one hop; 0: as even as possible, in few spans.

    Raises:
        ValueError: more tokens than pairs can be counted of.
    """
    if length**2 * len(rows) >= 2**63:
        raise ValueError(f"{length} tokens in {len(rows)} rows: pairs are counted up to 2^63; give fewer")
    work = Work.of(rows)
    spans = spread_spans(length, shards, rows, work, traffic) if traffic and shards > 1 else None
    return spans or evenest_spans(length, shards, work)


def evenest_spans(length: int, shards: int, work: Work) -> list[list[range]]:
    """The fewest spans that reach `GOAL`, or the most even ones."""
    whole = TokenRuns(np.array([0]), np.array([length]))
    mean, best = work.total / shards, Division([], float("inf"))
    for each in CHUNKS:
        if (each > 1 and shards * each > length) or (best.unevenness <= GOAL and best.longest <= each):
            break
        finer = by_density(whole, shards * each, work, DENSE * mean / each)
        for parts in ([whole], finer)[: len(finer)]:
            chunks = Chunks.of(parts, shards, each, work)
            if best.worse_than(over(chunks.largest, mean), each * len(parts)):
                found = chunks.shared_out(mean)
                best = found if best.worse_than(found.unevenness, found.longest) else best
    return best.spans


@dataclass(frozen=True)
class Chunks:
    """Parts of a sequence in equal chunks, as many of each part for every shard.

    Args:
        pairs: of each chunk, as queries and as keys: [2, n].
    """

    parts: list[TokenRuns]
    shards: int
    work: Work
    pairs: Integers

    @classmethod
    def of(cls, parts: list[TokenRuns], shards: int, each: int, work: Work) -> Chunks:
        pairs = [part.pairs(equal_ends(part.size, shards * each), work) for part in parts]
        return cls(parts, shards, work, np.concatenate(pairs, axis=1))

    @property
    def largest(self) -> int:
        return int(self.pairs.max())

    def shared_out(self, mean: float) -> Division:
        """Sizes of shards differ by one at most."""
        kinds = np.repeat(np.arange(len(self.parts)), self.pairs.shape[1] // len(self.parts))
        owners = shared_out(self.pairs, kinds, self.shards, max(GOAL * mean, self.largest))
        spans, loads = [list[range]() for _ in range(self.shards)], np.zeros((self.shards, 2), dtype=np.int64)
        for part, owner in zip(self.parts, owners.reshape(len(self.parts), -1), strict=True):
            ends = ends_for(part.size, owner, self.shards)
            np.add.at(loads, owner, part.pairs(ends, self.work).T)
            for chunk, shard in enumerate(owner.tolist()):
                spans[shard] += part.spans(*ends[chunk : chunk + 2].tolist())
        rising = [sorted(shard, key=lambda span: span.start) for shard in spans]
        return Division(rising, over(int(loads.max()), mean))


def over(most: int, mean: float) -> float:
    """1 where there is nothing at all."""
    return most / mean if mean else 1.0


def ends_for(size: int, owner: Integers, shards: int) -> Integers:
    """Boundaries of chunks whose sizes differ by one at most, and the sizes of their owners too."""
    base, more = divmod(size, len(owner))
    longer = [more // shards + (shard < more % shards) for shard in range(shards)]  # chunks that have a token more
    sizes = np.full(len(owner), base)
    for shard in range(shards) if more else ():
        sizes[np.flatnonzero(owner == shard)[: longer[shard]]] += 1
    return np.concatenate(([0], np.cumsum(sizes)))
