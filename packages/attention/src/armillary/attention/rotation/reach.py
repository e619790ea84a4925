"""The number of hops that each token of a rotating shard travels. Pure."""

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
    """First and last step at which each token of one rotating shard is visible to the rank that holds it.

    Tokens are grouped into runs with equal steps.

    Args:
        ranks: R, the ring size. At step 0 a shard is on the rank that owns it.
        ends: int64 [n + 1], from 0 to the number of tokens; run i is ends[i] .. ends[i + 1].
        first, last: int64 [n], steps in 1 .. R - 1; R and 0 for a run that no other rank sees.
    """

    ranks: int
    ends: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: int, visible: Sequence[TokenRanges]) -> Reach:
        """Returns the reach of a shard of `tokens` tokens.

        Args:
            visible: tokens that the ranks holding the shard at steps 1 .. R - 1 see.
        """
        ranks, runs = len(visible) + 1, [run for ranges in visible for run in ranges.runs]
        steps = np.repeat(np.arange(1, ranks), [len(ranges.runs) for ranges in visible])
        sides = np.fromiter(chain(map(START, runs), map(STOP, runs), (0, tokens)), np.int64)
        # Runs of tokens between two sides have equal steps.
        ends = np.unique(sides)
        starts, stops = np.searchsorted(ends, sides[:-2]).reshape(2, -1)
        # +1 where a run starts and -1 where it stops; their running sum is 1 inside of runs. Runs of one step never
        # touch, so no entry is written twice.
        edges = np.zeros((ranks, len(ends)), np.int8)
        edges[steps, starts], edges[steps, stops] = 1, -1
        inside = edges.cumsum(1, dtype=np.int8)[:, :-1] > 0
        is_unseen = ~inside.any(0)
        first, last = inside.argmax(0), ranks - 1 - inside[::-1].argmax(0)
        return cls(ranks, ends, np.where(is_unseen, ranks, first), np.where(is_unseen, 0, last))

    @property
    def opposite(self) -> Reach:
        """Reach in the opposite direction: the rank at step s is then at step R - s."""
        return Reach(self.ranks, self.ends, self.ranks - self.last, self.ranks - self.first)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens in flight at steps 0 .. R: `tokens_at(step).count`, of all steps at once."""
        sizes, counts = np.diff(self.ends), np.zeros(self.ranks + 1, np.int64)
        np.add.at(counts, self.last, sizes)
        return tuple(map(int, counts[::-1].cumsum()[::-1]))

    def tokens_at(self, step: int) -> TokenRanges:
        """Returns the tokens that the rank at `step` or a later one sees: all of them at step 0, none at step R."""
        return TokenRanges.select(self.ends, self.last >= step)

    def final_tokens_at(self, step: int) -> TokenRanges:
        """Returns the tokens whose last step is `step`."""
        return TokenRanges.select(self.ends, self.last == step)
