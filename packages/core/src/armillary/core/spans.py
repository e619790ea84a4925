"""Spans, the ranges of positions of a shard: how they are joined, cut and checked for gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from math import lcm

MAX_POSITION = 2**63 - 1
"""Largest position: positions are 64-bit integers."""

Spans = tuple[range, ...]
"""Ranges of positions in local order. A span may have a step: `range(1, 16, 4)` is 1, 5, 9, 13."""


def join_spans(spans: Iterable[range]) -> Spans:
    """Returns the same positions in the same order, without empty spans.

    A span that continues the previous one with the same step is joined to it.

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
        if joined_spans and (union := _join(joined_spans[-1], span)) is not None:
            joined_spans[-1] = union
        else:
            joined_spans.append(span)
    return tuple(joined_spans)


def _join(a: range, b: range) -> range | None:
    """Returns `a` followed by `b` as one span, or None if they do not form one."""
    step = a.step if len(a) > 1 else b.step
    same_step = len(b) == 1 or b.step == step
    return range(a.start, b[-1] + 1, step) if same_step and b.start == a[-1] + step else None


def span_text(span: range) -> str:
    """Returns "start:stop", or "start:stop:step" for a step above 1."""
    return f"{span.start}:{span.stop}" + (f":{span.step}" if span.step > 1 else "")


def missing_position(spans: Sequence[range]) -> int | None:
    """Returns the smallest position that no span has, up to the largest one of all spans; None if there is no gap.

    The time depends on the number of spans and the ratios of their steps, not on their lengths.

    Raises:
        ValueError: two spans hold the same position.
    """
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
    """Returns the positions of the span as pieces with step `step`, which is a multiple of the span's step."""
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
