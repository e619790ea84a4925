"""Patterns: conditions of a mask besides causality, a window and documents. Their base classes, and those of documents.

Patterns that are lists of slices, segments or blocks are in `slices_trees_blocks.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args
from zlib import crc32

import numpy as np

from armillary.core.internal import (
    FAR,
    Integers,
    Slices,
    Window,
    band,
    check_choice,
    document_slices,
    integer,
    slice_array,
)

Ends = tuple[int, ...] | None
"""Boundaries of a row's documents; None without documents."""
Origin = Literal["document", "row"]


class Pattern(ABC):
    """Base class of patterns. Immutable, hashable and cheap to compare.

    Not a dataclass: at every call, FSDP2 rebuilds each dataclass among a module's arguments and visits all its numbers.
    """

    code: ClassVar[int]
    """Identifies the class in `Content.numbers`."""
    takes_documents: ClassVar[bool] = False
    """True if the mask may have documents too."""
    says_causal: ClassVar[bool] = False
    """True if the pattern itself defines which later keys are visible, so that `causal` must not hide them."""

    @cached_property
    @abstractmethod
    def numbers(self) -> Integers:
        """The constructor's arguments as integers, without `code`."""

    @cached_property
    def _hash(self) -> int:
        return crc32(self.numbers.tobytes(), self.code)  # unlike Python's hash of bytes, equal in every process

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Pattern) or self.code != other.code:
            return False
        return hash(self) == hash(other) and np.array_equal(self.numbers, other.numbers)

    def __repr__(self) -> str:
        init_code = type(self).__init__.__code__
        arguments = init_code.co_varnames[1 : init_code.co_argcount]
        shown = ", ".join(f"{name}={short_repr(value)}" for name, value in vars(self).items() if name in arguments)
        return f"{type(self).__name__}({shown})"


class RowPattern(Pattern):
    """A pattern of one row of a batch (all patterns except `RowMasks`). `ends` are the row's document boundaries."""

    @classmethod
    @abstractmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """Returns the pattern that `numbers` encodes."""

    @abstractmethod
    def check(self, ends: Ends, queries: int, keys: int) -> None:
        """Raises ValueError if the pattern does not fit this many queries and keys."""

    @abstractmethod
    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        """Returns disjoint slices with the pairs that the pattern makes visible.

        The caller then hides the pairs outside of `bounds`.
        """

    def bounds(self, causal: bool, window: Window | None) -> Window:
        """Returns the band (low, high) that causality and the window leave visible, if `slices` did not apply them."""
        return band(causal and not self.says_causal, window)

    def positions(self, ends: Ends, length: int) -> Integers:
        return offsets(ends, length)


def integers(*arrays: Any) -> Integers:
    return np.concatenate([np.asarray(array, dtype=np.int64).ravel() for array in arrays])


def offsets(ends: Ends, length: int) -> Integers:
    """Offset of each position from the start of its document, or of the row without documents."""
    positions = np.arange(length, dtype=np.int64)
    if ends is None:
        return positions
    starts = np.asarray(ends[:-1], dtype=np.int64)
    return positions - np.repeat(starts, np.diff(np.asarray(ends, dtype=np.int64)))


def short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 96 else f"{text[:93]}..."


# -- patterns of documents ---------------------------------------------------------------------------------------------


class Prefix(RowPattern):
    """Tokens of a document's prefix see the whole prefix. Later tokens see their document up to themselves."""

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
        bounds, prefixes = np.array((0, queries) if ends is None else ends), np.array(self.prefixes)
        starts, stops, prefix_ends = bounds[:-1], bounds[1:], bounds[:-1] + prefixes
        far = np.full_like(starts, FAR)
        # (q0, q1, k0, k1, low, high): all tokens of the document see the prefix; later tokens see each other causally.
        columns = np.stack((starts, stops, starts, prefix_ends, -far, far), axis=1)
        squares = np.stack((prefix_ends, stops, prefix_ends, stops, -far, 0 * far), axis=1)
        # Drops the empty slices of documents without a prefix, or without later tokens.
        slices = np.concatenate((columns, squares))
        return slices[(slices[:, 0] < slices[:, 1]) & (slices[:, 2] < slices[:, 3])]


class Chunked(RowPattern):
    """Tokens see their own chunk of `size` positions, and only their document."""

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


class ImageSpans(RowPattern):
    """A token sees its document up to itself and, in an image, all tokens of the image's span.

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
        # The right side of the window would hide the later keys of a span.
        return band(False, None if window is None else (window[0], None))

    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        causal = document_slices((0, queries) if ends is None else ends, high=0)
        # Without the diagonal, which the causal slices have: slices must be disjoint.
        later = slice_array((span.start, span.stop, span.start, span.stop, 1, None) for span in self.spans)
        return np.concatenate((causal, later))


# -- rows of a batch ---------------------------------------------------------------------------------------------------


class RowMasks(Pattern):
    """One mask for each row of a batch.

    Raises:
        ValueError: no masks, or an element that is not a mask of one row.
    """

    code = 7

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = tuple(masks)
        if not self.masks:
            raise ValueError("no masks; one for each row of the batch is needed")
        for row, mask in enumerate(self.masks):
            if getattr(mask, "per_row", True):
                raise ValueError(f"the mask of row {row} is {mask!r}; an AttentionMask of one row is needed")

    @cached_property
    def numbers(self) -> Integers:
        # The encoding of each mask follows its length.
        return integers(*(row_numbers for mask in self.masks for row_numbers in ((len(mask.encoded),), mask.encoded)))
