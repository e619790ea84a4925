"""How far the tokens of a shard go round a ring: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from armillary.core.token_ranges import TokenRanges

START, STOP = attrgetter("start"), attrgetter("stop")


@dataclass(frozen=True, eq=False)
class Reach:
    """At which steps the tokens of one rotating shard are first and last seen, for runs of tokens that are alike.

    Args:
        ranks: R of the ring. At step 0 a shard is where it set out, from where all of it may be sent.
        ends: int64 [n + 1], from 0 to the shard's tokens: run i is ends[i] .. ends[i + 1].
        first, last: int64 [n], among steps 1 .. R - 1; R and 0 where no other rank sees the run.
    """

    ranks: int
    ends: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: int, seen: Sequence[TokenRanges]) -> Reach:
        """Of a shard of so many tokens.

        Args:
            seen: what the ranks see of it that have it at steps 1 .. R - 1.
        """
        ranks, runs = len(seen) + 1, [run for some in seen for run in some.runs]
        steps = np.repeat(np.arange(1, ranks), [len(some.runs) for some in seen])
        sides = np.fromiter(chain(map(START, runs), map(STOP, runs), (0, tokens)), np.int64)
        ends = np.unique(sides)
        starts, stops = np.searchsorted(ends, sides[:-2]).reshape(2, -1)
        turns = np.zeros((ranks, len(ends)), np.int8)  # no run ends where another of the same step begins
        turns[steps, starts], turns[steps, stops] = 1, -1
        visible = turns.cumsum(1, dtype=np.int8)[:, :-1] > 0
        nobody = ~visible.any(0)
        first, last = visible.argmax(0), ranks - 1 - visible[::-1].argmax(0)
        return cls(ranks, ends, np.where(nobody, ranks, first), np.where(nobody, 0, last))

    @property
    def opposite(self) -> Reach:
        """The other way round: who comes first comes last."""
        return Reach(self.ranks, self.ends, self.ranks - self.last, self.ranks - self.first)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens that are needed at steps 0 .. R."""
        sizes, counts = np.diff(self.ends), np.zeros(self.ranks + 1, np.int64)
        np.add.at(counts, self.last, sizes)
        return tuple(map(int, counts[::-1].cumsum()[::-1]))

    def needed(self, step: int) -> TokenRanges:
        """Tokens that a rank so many steps on, or further, sees: all at step 0, none at step R."""
        return TokenRanges.where(self.ends, self.last >= step)

    def ending(self, step: int) -> TokenRanges:
        """Tokens that go so many steps and no further."""
        return TokenRanges.where(self.ends, self.last == step)
