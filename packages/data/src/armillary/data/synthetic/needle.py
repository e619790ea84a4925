"""A needle in a haystack: one key and its value, hidden in filler tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from armillary.data.loader.batches import check_minimum
from armillary.data.shuffle import Index
from armillary.data.synthetic.task import Task, draw


@dataclass(frozen=True)
class Needle(Task):
    """Filler tokens with one needle: a key, and after it a value of several tokens. The end of the row repeats both.

    The repeated key is the question. The tokens of the repeated value are the labels.

    Args:
        length: N.
        depth: place of the needle, from 0 (start of the row) to 1 (directly before the question). None: random, and
            different in each row.
        needle_tokens: number of tokens of the value.
        keys, values, fillers: number of different tokens of each kind.
        seed: seed of random tokens and places.

    Raises:
        ValueError: a row too short for needle and question, a depth outside of 0..1, or counts below 1.
    """

    length: int
    depth: float | None = None
    needle_tokens: int = 4
    keys: int = 16
    values: int = 64
    fillers: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimum(1, needle_tokens=self.needle_tokens, keys=self.keys, values=self.values, fillers=self.fillers)
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(f"depth must lie between 0 and 1, or be None for random ones; got {self.depth}")
        shortest = 2 * (self.needle_tokens + 1)
        if self.length < shortest:
            raise ValueError(
                f"a row of {self.length} tokens is too short for a needle of {self.needle_tokens} tokens behind a key, "
                f"and for both again as question and answer; give at least {shortest}"
            )

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.fillers

    @property
    def _question(self) -> int:
        """Position of the repeated key."""
        return self.length - 1 - self.needle_tokens

    def _tokens(self, row: int, positions: Index) -> Index:
        def random(kind: str, places: Index, n: int) -> Index:
            return draw(f"needle's {kind}, row {row}, seed {self.seed}", places, n)

        last = self._question - 1 - self.needle_tokens  # the last position at which the needle can start
        if self.depth is None:
            start = int(random("depth", np.zeros(1, np.int64), last + 1)[0])
        else:
            start = round(self.depth * last)
        # Offset of each position within the needle or its repetition: 0 is the key, 1 the value's first token.
        # Positions of filler have a negative or too large offset.
        offset = positions - np.where(positions < self._question, start, self._question)
        key = random("key", np.zeros_like(positions), self.keys)
        value = self.keys + random("value", offset, self.values)
        filler = self.keys + self.values + random("filler", positions, self.fillers)
        outside = (offset < 0) | (offset > self.needle_tokens)
        return np.where(outside, filler, np.where(offset == 0, key, value))

    def _asks(self, positions: Index) -> npt.NDArray[np.bool_]:
        return (positions >= self._question) & (positions < self.length - 1)
