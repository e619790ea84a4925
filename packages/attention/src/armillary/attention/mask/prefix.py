"""Prefix language models: the prefix of each document is bidirectional, the following tokens are causal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from armillary.attention.mask.pattern import Ends, RowPattern, integers
from armillary.core.parts import FAR, Integers, Slices, Window, integer


class Prefix(RowPattern):
    """Tokens of a document's prefix see the whole prefix. Later tokens see their document up to themselves.

    Args:
        prefixes: number of tokens of each document's prefix.

    Raises:
        ValueError: numbers that are not integers of at least 0.
    """

    code = 3
    takes_documents, says_causal = True, True

    def __init__(self, prefixes: Sequence[int]) -> None:
        self.prefixes = tuple(integer("prefix", prefix, minimum=0) for prefix in prefixes)

    @cached_property
    def numbers(self) -> Integers:
        return integers(self.prefixes)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Prefix:
        return cls(numbers)

    def check(self, ends: Ends, queries: int, keys: int) -> None:
        if queries != keys:
            raise ValueError(f"prefixes for {queries} queries and {keys} keys; both must be of one sequence")
        ends = (0, queries) if ends is None else ends
        if len(ends) - 1 != len(self.prefixes):
            raise ValueError(f"{len(self.prefixes)} prefixes for {len(ends) - 1} documents; each needs one, 0 for none")
        for document, prefix in enumerate(self.prefixes):
            tokens = ends[document + 1] - ends[document]
            if prefix > tokens:
                raise ValueError(f"a prefix of {prefix} tokens in document {document}, which has {tokens}")

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        """Returns two slices for each document: the keys of its prefix, and the causal square of the later tokens."""
        bounds, prefixes = np.array((0, queries) if ends is None else ends), np.array(self.prefixes)
        starts, stops, prefix_ends = bounds[:-1], bounds[1:], bounds[:-1] + prefixes
        far = np.full_like(starts, FAR)
        # (q0, q1, k0, k1, low, high): all tokens of the document see the prefix; later tokens see each other causally.
        columns = np.stack((starts, stops, starts, prefix_ends, -far, far), axis=1)
        squares = np.stack((prefix_ends, stops, prefix_ends, stops, -far, 0 * far), axis=1)
        # Drops the empty slices of documents without a prefix, or without later tokens.
        slices = np.concatenate((columns, squares))
        return slices[(slices[:, 0] < slices[:, 1]) & (slices[:, 2] < slices[:, 3])]
