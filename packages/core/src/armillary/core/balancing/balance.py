"""Balanced layouts: the same attention work on every shard, in few spans.

Under a causal mask late queries see more keys. Zigzag balances that: shard r holds chunks r and 2 P - 1 - r of 2 P.
Zigzag is uneven under other masks: in packed documents a query sees only its own document, and all answers to a prompt
see the prompt. `balanced_spans` calls `spread.spread_spans`, which also weighs the bytes sent. `evenest_spans` searches
by work alone. It is used if sending costs nothing, and its layout is one of those weighed if no other is even:

1. Cut the sequence into equal chunks, a few per shard, and count the visible (query, key) pairs of each.
2. Give each shard equally many chunks, so that the most loaded shard is close to the mean (`partition.distribute`).
3. If a few chunks have most of the pairs, cut these again into smaller chunks, and repeat step 2.

Pairs are counted twice, and both counts are balanced: the pairs of a shard's queries are its work when keys rotate, the
pairs of its keys are its work when queries rotate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
    def most_spans(self) -> int:
        """Largest number of spans on one shard."""
        return max(map(len, self.spans), default=0)

    def worse_than(self, unevenness: float, most_spans: int) -> bool:
        """Returns True if a new division with these two numbers should replace this one.

        - If both reach `GOAL`, the one with fewer spans is better.
        - If only the new one reaches `GOAL`, it is better.
        - If the new one does not reach `GOAL`, it is better if it is more even by more than `GAIN`.
        """
        if max(unevenness, self.unevenness) <= GOAL:
            return most_spans < self.most_spans
        return unevenness < self.unevenness - (GAIN if unevenness > GOAL else 0)


def balanced_spans(
    length: int, shards: int, rows: Sequence[Slices], send_cost: float, sides: tuple[int, ...] = (0,)
) -> list[list[range]]:
    """Returns the spans of each shard, in rising order.

    Args:
        send_cost: as in `SequenceLayout.balanced`.
        sides: the counts of pairs that are balanced: 0 by queries, 1 by keys. `evenest_spans` always balances both.

    Raises:
        ValueError: `length`^2 times the number of rows is 2^63 or more, so that counts of pairs could overflow.
    """
    if length**2 * len(rows) >= 2**63:
        raise ValueError(f"{length} tokens in {len(rows)} rows: pairs are counted up to 2^63; give fewer")
    work = Work.of(rows)
    most_even = partial(evenest_spans, length, shards, work)
    return (
        spread_spans(length, shards, rows, work, send_cost, most_even, sides)
        if send_cost and shards > 1
        else most_even()
    )


def evenest_spans(length: int, shards: int, work: Work) -> list[list[range]]:
    """Returns the spans of the division that reaches `GOAL` in the fewest spans, or else of the most even one."""
    all_tokens = TokenRuns(np.array([0]), np.array([length]))
    mean, best = work.total / shards, Division([], float("inf"))
    for chunks_per_shard in CHUNKS:
        too_many_chunks = chunks_per_shard > 1 and shards * chunks_per_shard > length
        # Stop if `best` is even enough and more chunks per shard would not make fewer spans.
        if too_many_chunks or (best.unevenness <= GOAL and best.most_spans <= chunks_per_shard):
            break
        density_groups = split_by_density(all_tokens, shards * chunks_per_shard, work, DENSE * mean / chunks_per_shard)
        # First equal chunks of the whole sequence; then, if some are dense, equal chunks of each density group.
        for groups in [[all_tokens], density_groups] if len(density_groups) > 1 else [[all_tokens]]:
            chunks = Chunks.of(groups, shards, chunks_per_shard, work)
            # One shard has the largest chunk, so its pairs are a lower bound of the maximum load. Distribute the chunks
            # only if a division with this load would be better.
            if best.worse_than(imbalance(chunks.largest, mean), chunks_per_shard * len(groups)):
                division = chunks.distribute(mean)
                best = division if best.worse_than(division.unevenness, division.most_spans) else best
    return best.spans


@dataclass(frozen=True)
class Chunks:
    """Chunks to be distributed over shards.

    Args:
        groups: groups of tokens. Each group is cut into the same number of chunks, a multiple of `shards`. Sizes of its
            chunks differ by at most one token.
        pairs: pairs of each chunk's queries and of its keys: [2, chunks].
    """

    groups: list[TokenRuns]
    shards: int
    work: Work
    pairs: Integers

    @classmethod
    def of(cls, groups: list[TokenRuns], shards: int, chunks_per_shard: int, work: Work) -> Chunks:
        pairs = [group.pairs(equal_ends(group.size, shards * chunks_per_shard), work) for group in groups]
        return cls(groups, shards, work, np.concatenate(pairs, axis=1))

    @property
    def largest(self) -> int:
        """Pairs of the largest chunk, by either count."""
        return int(self.pairs.max())

    def distribute(self, mean: float) -> Division:
        """Returns the division over shards, whose numbers of tokens differ by at most one.

        Args:
            mean: mean number of pairs per shard.
        """
        # `distribute` gives every shard equally many chunks of each kind; the kind of a chunk is its group's number.
        kinds = np.repeat(np.arange(len(self.groups)), self.pairs.shape[1] // len(self.groups))
        owners = distribute(self.pairs, kinds, self.shards, max(GOAL * mean, self.largest))
        spans, loads = [list[range]() for _ in range(self.shards)], np.zeros((self.shards, 2), dtype=np.int64)
        for group, owner in zip(self.groups, owners.reshape(len(self.groups), -1), strict=True):
            # Some chunks may be one token longer. Now that their shards are known, move the ends of chunks so that each
            # shard has equally many of the longer ones, give or take one. Then count the pairs again.
            ends = ends_for(group.size, owner, self.shards)
            np.add.at(loads, owner, group.pairs(ends, self.work).T)
            for chunk, shard in enumerate(owner.tolist()):
                spans[shard] += group.spans(*ends[chunk : chunk + 2].tolist())
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
    if remainder:
        for shard in range(shards):
            sizes[np.flatnonzero(owner == shard)[: longer[shard]]] += 1
    return np.concatenate(([0], np.cumsum(sizes)))
