"""Some of a shard's tokens: as runs of local indices, and packed one after another in a tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, cat


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """The tokens of some ranges, in order. A tensor that holds them has them packed on dim 1, without what is between.

    Compared by identity, as caches are looked into by them at every step of a ring, and ranges may be hundreds:
    compare `runs`.

    Args:
        runs: ranges of step 1, none empty, in order, with a gap between each two.
    """

    runs: tuple[range, ...] = ()

    @classmethod
    def union(cls, ranges: Iterable[range]) -> TokenRanges:
        """The tokens of any ranges of step 1: in any order, empty, or with tokens in common."""
        runs: list[range] = []
        for tokens in sorted((some for some in ranges if some), key=_start):
            if runs and tokens.start <= runs[-1].stop:
                runs[-1] = range(runs[-1].start, max(runs[-1].stop, tokens.stop))
            else:
                runs.append(tokens)
        return cls(tuple(runs))

    @classmethod
    def where(cls, ends: NDArray[np.int64], wanted: NDArray[np.bool_]) -> TokenRanges:
        """The tokens ends[i] .. ends[i + 1] for which wanted[i] is true; `ends` rises."""
        turns = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
        return cls(tuple(map(range, ends[turns[::2]].tolist(), ends[turns[1::2]].tolist())))

    @cached_property
    def count(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.runs))

    @cached_property
    def _begins(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where each run begins: in the shard, and packed."""
        return tuple(map(_start, self.runs)), tuple(accumulate(map(len, self.runs), initial=0))

    def index(self, token: int) -> int:
        """Where one of these tokens is when they are packed."""
        starts, packed = self._begins
        run = bisect_right(starts, token) - 1
        return packed[run] + token - starts[run]

    def within(self, held: TokenRanges) -> TokenRanges:
        """Where these tokens, all of them in `held`, are when that is packed."""
        begins = ((held.index(run.start), len(run)) for run in self.runs)
        return TokenRanges.union(range(at, at + tokens) for at, tokens in begins)

    # -- in tensors, whose tokens are on dim 1 ------------------------------------------------------------------------

    def take(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """These tokens of `x`: x itself where they are all that it holds, a view of one run or of none, else a copy.

        Args:
            out: where a copy goes.
        """
        if self.count == x.shape[1]:
            return x
        if not self.runs:
            return x[:, :0]
        if len(self.runs) == 1:
            (run,) = self.runs
            return x.narrow(1, run.start, len(run))
        return cat(self.views(x), 1, out=out)

    def views(self, x: Tensor) -> list[Tensor]:
        """The runs of `x`: itself where it holds no other tokens."""
        if self.count == x.shape[1]:
            return [x]
        return [x.narrow(1, run.start, len(run)) for run in self.runs]

    def unpack(self, packed: Tensor) -> Sequence[Tensor]:
        """The runs of a tensor that holds these tokens, as views."""
        return (packed,) if len(self.runs) == 1 else packed.split_with_sizes(list(map(len, self.runs)), 1)

    def put(self, x: Tensor, packed: Tensor) -> None:
        """Makes these tokens of `x` those that a tensor holds, in place."""
        for view, part in zip(self.views(x), self.unpack(packed), strict=True):
            view.copy_(part)

    def add(self, x: Tensor, packed: Tensor) -> None:
        """Adds a tensor that holds these tokens to those of `x`, in place."""
        for view, share in zip(self.views(x), self.unpack(packed), strict=True):
            view.add_(share)


def _start(tokens: range) -> int:
    return tokens.start
