"""Attention within chunks of a fixed size, as in Llama 4's local layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.parts import Integers, Slices, Window, check_choice, document_slices, integer

Origin = Literal["document", "row"]


class Chunked(RowPattern):
    """Tokens see their own chunk of `size` positions, and only their document.

    Args:
        origin: where chunks are counted from: the start of each "document", or the start of the "row".

    Raises:
        ValueError: a size below 1, or an unknown origin.
    """

    code = 4
    takes_documents = True

    def __init__(self, size: int, origin: Origin = "document") -> None:
        self.size = integer("size", size, minimum=1)
        self.origin = check_choice("origin", origin, get_args(Origin))

    @cached_property
    def numbers(self) -> Integers:
        return integers((self.size, get_args(Origin).index(self.origin)))

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Chunked:
        return cls(numbers[0], get_args(Origin)[numbers[1]])

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        if queries != keys:
            raise ValueError(f"chunks for {queries} queries and {keys} keys; both must be of one sequence")

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        # Chunks are documents of their own: slices of documents with a boundary at every start of a chunk.
        ends = (0, queries) if ends is None else ends
        if self.origin == "row":
            return document_slices(sorted({*ends, *range(0, queries, self.size)}))
        starts = (start for first, stop in pairwise(ends) for start in range(first, stop, self.size))
        return document_slices((*starts, queries))
