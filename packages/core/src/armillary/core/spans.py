"""Ranges of tokens: spans of global positions, of which layouts consist, and some tokens of a shard by local index."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import lcm
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, cat

MAX_POSITION = 2**63 - 1
"""Largest position: positions are 64-bit integers."""

Spans = tuple[range, ...]
"""Ranges of positions in local order. A span may have a step: `range(1, 16, 4)` is 1, 5, 9, 13."""


def join_spans(spans: Iterable[range]) -> Spans:
    """Returns the same positions in the same order, without empty spans.

    Raises:
        ValueError: a span is not a range, has a step below 1, or reaches beyond `MAX_POSITION`.
    """
    joined_spans: list[range] = []
    for span in spans:
        if not isinstance(span, range):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            raise ValueError(f"span {span!r}: a shard is a list of ranges, such as [range(0, 8), range(24, 32)]")
        if span.step < 1:
            raise ValueError(f"{span} runs backwards; spans need a step of at least 1")
        if not span:
            continue
        if span[-1] > MAX_POSITION:
            raise ValueError(f"{span}: positions are counted up to 2^63 - 1")
        # One form for equal positions: the stop is one past the last position, and a single position has step 1.
        span = range(span[0], span[-1] + 1, span.step if len(span) > 1 else 1)
        # Joined to the previous span if it continues that one; of a single position either span has the step.
        previous = joined_spans[-1] if joined_spans else range(0)
        step = previous.step if len(previous) > 1 else span.step
        if previous and span.start == previous[-1] + step and (len(span) == 1 or span.step == step):
            joined_spans[-1] = range(previous.start, span[-1] + 1, step)
        else:
            joined_spans.append(span)
    return tuple(joined_spans)


def span_text(span: range) -> str:
    return f"{span.start}:{span.stop}" + (f":{span.step}" if span.step > 1 else "")


def missing_position(spans: Sequence[range]) -> int | None:
    """Returns the smallest position that no span has, up to the largest one of all spans; None if there is no gap.

    Raises:
        ValueError: two spans hold the same position.
    """
    # The time depends on the number of spans and the ratios of their steps, not on their lengths.
    # Split all spans into pieces of one common step. A piece has positions of one remainder modulo `step`. Sorted by
    # remainder and position, the pieces of each remainder must follow each other without gaps.
    step = lcm(*(span.step for span in spans))
    pieces = sorted((x[0] % step, x[0], x[-1], i) for i, span in enumerate(spans) for x in _split(span, step))
    # For each remainder the first position not yet covered. Not `dict[int, int]()`, which dynamo cannot trace.
    expected: dict[int, int] = {}
    gaps: list[int] = []
    for remainder, first, last, i in pieces:
        next_position = expected.get(remainder, remainder)
        if first < next_position:
            raise ValueError(f"{spans[i]} has a position that another span of the layout has too")
        if first > next_position:
            gaps.append(next_position)
        expected[remainder] = last + step
    # Remainders whose pieces end too early, and the first remainder without pieces.
    end = max(span[-1] for span in spans)
    gaps += [next_position for next_position in expected.values() if next_position <= end]
    gaps.extend(islice((r for r in range(min(step, end + 1)) if r not in expected), 1))  # dynamo cannot trace `+=` here
    return min(gaps, default=None)


def _split(span: range, step: int) -> Iterable[range]:
    times = step // span.step
    return (span[i::times] for i in range(min(times, len(span)))) if times > 1 else (span,)


def cut(span: range, n: int) -> list[range]:
    """Returns `span` in `n` consecutive pieces whose sizes differ by at most one, larger ones first."""
    base, larger = divmod(len(span), n)
    ends = list(accumulate((base + (i < larger) for i in range(n)), initial=0))
    return [span[ends[i] : ends[i + 1]] for i in range(n)]


def cut_spans(spans: Spans, n: int) -> list[list[range]]:
    """Returns `spans`, taken as one sequence of tokens, in `n` consecutive pieces."""
    starts = list(accumulate(map(len, spans), initial=0))
    return [
        [s[max(0, piece.start - start) : max(0, piece.stop - start)] for s, start in zip(spans, starts, strict=False)]
        for piece in cut(range(starts[-1]), n)
    ]


# -- some tokens of a shard, by local index ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """Some tokens of a shard, in rising order. A packed tensor has these tokens on dim 1, without the gaps.

    Args:
        runs: non-empty ranges of step 1 in rising order, with a gap between consecutive ranges. Compare these: two
            objects are equal only if they are the same.
    """

    # Compared by identity, because caches look them up at every step of a ring, and may have hundreds of ranges.
    runs: tuple[range, ...] = ()

    @classmethod
    def union(cls, ranges: Iterable[range]) -> TokenRanges:
        """Returns the union of ranges of step 1, which may be unordered, empty or overlapping."""
        runs: list[range] = []
        for tokens in sorted((tokens for tokens in ranges if tokens), key=attrgetter("start")):
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
        return sum(map(len, self.runs))

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts of the runs: as local indices of the shard, and as indices of the packed tensor."""
        return tuple([run.start for run in self.runs]), tuple(accumulate(map(len, self.runs), initial=0))

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
