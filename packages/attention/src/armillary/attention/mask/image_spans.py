"""Text with images: the tokens of an image see each other both ways, as in Gemma 3."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.parts import Integers, Slices, Window, band, document_slices, slice_array


class ImageSpans(RowPattern):
    """A token sees its document up to itself and, in an image, all tokens of the image's span.

    Args:
        spans: ranges of positions, each within one document.

    Raises:
        ValueError: spans that are empty, not ranges of step 1, or overlap.
    """

    code = 5
    takes_documents, says_causal = True, True

    def __init__(self, spans: Sequence[Any]) -> None:
        for span in spans:
            if not isinstance(span, range) or span.step != 1 or not span or span.start < 0:
                raise ValueError(f"image span {span!r}: a range of step 1 with at least one position is needed")
        self.spans: tuple[range, ...] = tuple(sorted(spans, key=lambda span: span.start))
        for a, b in pairwise(self.spans):
            if a.stop > b.start:
                raise ValueError(f"image spans {a} and {b} overlap; they must be disjoint")

    @cached_property
    def numbers(self) -> Integers:
        return integers([(span.start, span.stop) for span in self.spans])

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> ImageSpans:
        return cls([range(*edges) for edges in zip(numbers[::2], numbers[1::2], strict=True)])

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        if queries != keys:
            raise ValueError(f"image spans for {queries} queries and {keys} keys; both must be of one sequence")
        if self.spans and self.spans[-1].stop > queries:
            raise ValueError(f"image span {self.spans[-1]} is not within the sequence of {queries} tokens")
        ends = (0, queries) if ends is None else ends
        for span in self.spans:
            end = ends[bisect_right(ends, span.start)]
            if span.stop > end:
                raise ValueError(f"image span {span} reaches beyond its document, which ends at {end}")

    def bounds(self, causal: bool, window: Window | None) -> Window:
        """Returns the left side of the window only. The right side would hide the later keys of a span."""
        return band(False, None if window is None else (window[0], None))

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        """Returns the causal slice of each document, and the later keys (j - i >= 1) of each span."""
        causal = document_slices((0, queries) if ends is None else ends, high=0)
        # Without the diagonal, which the causal slices have: slices must be disjoint.
        later = slice_array((span.start, span.stop, span.start, span.stop, 1, None) for span in self.spans)
        return np.concatenate((causal, later))
