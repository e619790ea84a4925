"""The number of hops that each token of a rotating shard travels around a ring. Pure.

At step s a shard is on the rank s hops after its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from armillary.core import TokenRanges

START, STOP = attrgetter("start"), attrgetter("stop")


@dataclass(frozen=True, eq=False)
class Reach:
    """The first and the last step at which another rank sees each token of one rotating shard.

    The tokens are divided into n runs, in which all tokens have the same first and the same last step.

    Args:
        ranks: R, the number of ranks of the ring.
        ends: int64 [n + 1]; run i is tokens ends[i] .. ends[i + 1] - 1 of the shard.
        first: int64 [n], the first step of each run, 1 .. R - 1; R for a run that no other rank sees.
        last: int64 [n], the last step of each run, 1 .. R - 1; 0 for a run that no other rank sees.
    """

    ranks: int
    ends: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: int, visible: Sequence[TokenRanges]) -> Reach:
        """Returns the reach of a shard of `tokens` tokens.

        Args:
            visible: for each of steps 1 .. R - 1, the tokens that the rank with the shard sees.
        """
        ranks, runs = len(visible) + 1, [run for ranges in visible for run in ranges.runs]
        steps = np.repeat(np.arange(1, ranks), [len(ranges.runs) for ranges in visible])
        sides = np.fromiter(chain(map(START, runs), map(STOP, runs), (0, tokens)), np.int64)
        # No step starts or stops to see tokens between two neighbouring sides: the tokens between them are one run.
        ends = np.unique(sides)
        starts, stops = np.searchsorted(ends, sides[:-2]).reshape(2, -1)
        # [step, run]: +1 where a range of visible tokens starts and -1 where it stops, so that the running sum is 1
        # inside of visible ranges. The ranges of one step never touch, so no entry is written twice.
        edges = np.zeros((ranks, len(ends)), np.int8)
        edges[steps, starts], edges[steps, stops] = 1, -1
        inside = edges.cumsum(1, dtype=np.int8)[:, :-1] > 0
        is_unseen = ~inside.any(0)
        first, last = inside.argmax(0), ranks - 1 - inside[::-1].argmax(0)  # argmax finds the first True
        return cls(ranks, ends, np.where(is_unseen, ranks, first), np.where(is_unseen, 0, last))

    @property
    def opposite(self) -> Reach:
        """The reach in the opposite direction, in which a rank has the shard at step R - s instead of step s."""
        return Reach(self.ranks, self.ends, self.ranks - self.last, self.ranks - self.first)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """For each of steps 0 .. R, the number of tokens that travel so far: `tokens_at(step).count`."""
        # Adds up the tokens by their last step, then sums from the end: the tokens whose last step is `step` or later.
        sizes, counts = np.diff(self.ends), np.zeros(self.ranks + 1, np.int64)
        np.add.at(counts, self.last, sizes)
        return tuple(map(int, counts[::-1].cumsum()[::-1]))

    def tokens_at(self, step: int) -> TokenRanges:
        """Returns the tokens that a rank sees at `step` or later: all tokens for step 0, none for step R."""
        return TokenRanges.select(self.ends, self.last >= step)

    def final_tokens_at(self, step: int) -> TokenRanges:
        """Returns the tokens whose last step is `step`."""
        return TokenRanges.select(self.ends, self.last == step)
