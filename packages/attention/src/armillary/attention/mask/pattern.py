"""What a mask may be besides causal, windowed and cut into documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Self
from zlib import crc32

import numpy as np

from armillary.core.checked import Window
from armillary.core.slices import Integers, Slices, band

Ends = tuple[int, ...] | None
"""Boundaries of a row's documents."""


class Pattern(ABC):
    """A kind of mask, with its constructor's arguments. Immutable, hashable, cheap to compare.

    Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments, number by number, at every call.
    """

    code: ClassVar[int]
    """By which its numbers are known to be of this kind."""
    takes_documents: ClassVar[bool] = False
    says_causal: ClassVar[bool] = False
    """Whether it says itself which later keys are seen, and is not to be cut at the diagonal."""

    @cached_property
    @abstractmethod
    def numbers(self) -> Integers:
        """All of it, its code apart."""

    @cached_property
    def _hash(self) -> int:
        return crc32(self.numbers.tobytes(), self.code)  # the same in every process

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Pattern) or self.code != other.code:
            return False
        return hash(self) == hash(other) and np.array_equal(self.numbers, other.numbers)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={shortened(value)}" for name, value in vars(self).items() if name in self._shown())
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _shown(cls) -> set[str]:
        """Names of the constructor's arguments."""
        return set(cls.__init__.__code__.co_varnames[1 : cls.__init__.__code__.co_argcount])


class RowPattern(Pattern):
    """A kind of mask that says of one row who sees whom."""

    @classmethod
    @abstractmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """The pattern whose `numbers` these are."""

    @abstractmethod
    def check(self, ends: Ends, queries: int, keys: int) -> None:
        """Refuses, with a `ValueError`, a sequence of so many queries and keys that it does not fit."""

    @abstractmethod
    def slices(self, ends: Ends, window: Window | None, queries: int, keys: int) -> Slices:
        """Disjoint slices, which are cut to `bounds` after that."""

    def bounds(self, causal: bool, window: Window | None) -> Window:
        """The band of positions that slices are cut to."""
        return band(causal and not self.says_causal, window)

    def positions(self, ends: Ends, length: int) -> Integers:
        """Positions for RoPE [N]."""
        return offsets(ends, length)


def integers(*parts: Any) -> Integers:
    """Numbers one after another, in an array of one dim."""
    return np.concatenate([np.asarray(part, dtype=np.int64).ravel() for part in parts])


def offsets(ends: Ends, length: int) -> Integers:
    """Of each position, how far it is from the start of its document, or of the row."""
    every = np.arange(length, dtype=np.int64)
    if ends is None:
        return every
    starts = np.asarray(ends[:-1], dtype=np.int64)
    return every - np.repeat(starts, np.diff(np.asarray(ends, dtype=np.int64)))


def shortened(value: object) -> str:
    """A value for a message, in a line."""
    text = repr(value)
    return text if len(text) <= 96 else f"{text[:93]}..."
