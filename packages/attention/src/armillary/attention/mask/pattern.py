"""The base classes of patterns. A pattern is a condition of a mask besides causality, a window and documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Self
from zlib import crc32

import numpy as np

from armillary.core.parts import Integers, Slices, Window, band

Ends = tuple[int, ...] | None
"""Boundaries of a row's documents; None without documents."""


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
        """Returns position ids for RoPE, [N]."""
        return offsets(ends, length)


def integers(*arrays: Any) -> Integers:
    """Returns the numbers of all arrays, flattened and concatenated, as int64 [n]."""
    return np.concatenate([np.asarray(array, dtype=np.int64).ravel() for array in arrays])


def offsets(ends: Ends, length: int) -> Integers:
    """Returns the offset of each position from the start of its document, or of the row without documents."""
    positions = np.arange(length, dtype=np.int64)
    if ends is None:
        return positions
    starts = np.asarray(ends[:-1], dtype=np.int64)
    return positions - np.repeat(starts, np.diff(np.asarray(ends, dtype=np.int64)))


def short_repr(value: object) -> str:
    """Returns a value's repr, cut to 96 characters, for an error."""
    text = repr(value)
    return text if len(text) <= 96 else f"{text[:93]}..."
