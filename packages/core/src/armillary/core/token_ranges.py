"""Some tokens of a shard, as ranges of local indices; and packed tensors, which have only these tokens."""

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
    """Some tokens of a shard, in rising order. A packed tensor has these tokens on dim 1, without the gaps.

    Two objects are equal only if they are the same object: caches look them up at every step of a ring, and comparing
    hundreds of ranges would take long. Compare `runs` to find out whether two have equal tokens.

    Args:
        runs: non-empty ranges of step 1 in rising order, with a gap between consecutive ranges.
    """

    runs: tuple[range, ...] = ()

    @classmethod
    def union(cls, ranges: Iterable[range]) -> TokenRanges:
        """Returns the union of ranges of step 1, which may be unordered, empty or overlapping."""
        runs: list[range] = []
        for tokens in sorted((tokens for tokens in ranges if tokens), key=_start):
            if runs and tokens.start <= runs[-1].stop:
                runs[-1] = range(runs[-1].start, max(runs[-1].stop, tokens.stop))
            else:
                runs.append(tokens)
        return cls(tuple(runs))

    @classmethod
    def select(cls, ends: NDArray[np.int64], is_selected: NDArray[np.bool_]) -> TokenRanges:
        """Returns the tokens ends[i] .. ends[i + 1] - 1 of every i with is_selected[i]; `ends` rises."""
        # Indices i at which a run of selected ranges begins, ends, begins, ...
        edges = np.flatnonzero(np.diff(is_selected, prepend=False, append=False))
        return cls(tuple(map(range, ends[edges[::2]].tolist(), ends[edges[1::2]].tolist())))

    @cached_property
    def count(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.runs))

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts of the runs: as local indices of the shard, and as indices of the packed tensor."""
        return tuple(map(_start, self.runs)), tuple(accumulate(map(len, self.runs), initial=0))

    def index(self, token: int) -> int:
        """Returns the index in the packed tensor of a token that these ranges contain."""
        starts, packed_starts = self._starts
        run = bisect_right(starts, token) - 1
        return packed_starts[run] + token - starts[run]

    def within(self, container: TokenRanges) -> TokenRanges:
        """Returns the indices of these tokens in the packed tensor of `container`, which contains all of them."""
        positions = ((container.index(run.start), len(run)) for run in self.runs)
        return TokenRanges.union(range(start, start + tokens) for start, tokens in positions)

    # -- for tensors x with all tokens of the shard on dim 1 ----------------------------------------------------------

    def take(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns these tokens of `x`, packed: x itself for all tokens, a view for one run or none, otherwise a copy.

        Args:
            out: tensor that receives the copy, if one is made; by default a new one.
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
        """Returns a view of `x` for each run; x itself if these are all of its tokens."""
        if self.count == x.shape[1]:
            return [x]
        return [x.narrow(1, run.start, len(run)) for run in self.runs]

    def unpack(self, packed: Tensor) -> Sequence[Tensor]:
        """Returns a view of a packed tensor for each run."""
        return (packed,) if len(self.runs) == 1 else packed.split_with_sizes(list(map(len, self.runs)), 1)

    def put(self, x: Tensor, packed: Tensor) -> None:
        """Overwrites these tokens of `x` with a packed tensor, in place."""
        for view, values in zip(self.views(x), self.unpack(packed), strict=True):
            view.copy_(values)

    def add(self, x: Tensor, packed: Tensor) -> None:
        """Adds a packed tensor to these tokens of `x`, in place."""
        for view, addend in zip(self.views(x), self.unpack(packed), strict=True):
            view.add_(addend)


def _start(tokens: range) -> int:
    return tokens.start
