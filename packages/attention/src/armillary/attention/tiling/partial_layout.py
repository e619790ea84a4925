"""Layouts of only some positions of a sequence: the queries or keys of one node at one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from armillary.core import SequenceLayout, TokenRanges
from armillary.core.parts import Spans


class PartialLayout(SequenceLayout):
    """A layout of only some positions of a sequence. Its shards may be empty.

    Positions stay those of the full sequence, so that masks, tiles and methods use it like any other layout.

    Args:
        spans: spans of each shard, as in `SequenceLayout`; they need not cover all positions.
        length: number of positions of the full sequence.
    """

    __slots__ = ()

    def __init__(self, spans: Iterable[Iterable[range]], length: int) -> None:
        super().__init__(spans)
        self.length = length

    def _check(self) -> None:
        """Accepts any positions: instances are only made from parts of checked layouts."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and isinstance(other, SequenceLayout) and self.length == other.length

    __hash__ = SequenceLayout.__hash__

    def coarsen(self, n: int) -> PartialLayout:
        groups = (self.spans_by_shard[i : i + n] for i in range(0, self.shards, n))
        return PartialLayout(map(chain.from_iterable, groups), self.length)


def spans_at(spans: Spans, tokens: TokenRanges) -> Iterator[range]:
    """Yields the positions of some tokens of a shard.

    Args:
        spans: spans of the shard.
        tokens: indices of tokens in the shard.
    """
    start = 0
    for span in spans:
        for run in tokens.runs:
            yield span[max(0, run.start - start) : max(0, run.stop - start)]
        start += len(span)
