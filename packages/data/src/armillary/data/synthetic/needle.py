"""A needle in a haystack: one thing to be remembered, somewhere in filler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from armillary.data.loader.batch import IGNORE
from armillary.data.loader.batches import check_least
from armillary.data.shuffle import Index
from armillary.data.synthetic.draws import draw
from armillary.data.synthetic.task import checked, tensor


@dataclass(frozen=True)
class Needle:
    """Filler with one needle in it, a key and its value of several tokens, which stands at the end of the row again.

    Labels stand on the last key and on all tokens of the value behind it but the last: each asks for the value's next
    token. The row ends with the value.

    Args:
        length: N.
        depth: where the needle stands: 0 is the start of the row, 1 right before the question. None: at a random
            place, another one in each row.
        needle_tokens: tokens of the value.
        keys, values, fillers: how many different tokens there are of each; one key is drawn in each row.
        offset: the first key's number; values and fillers follow behind the keys.
        seed: rows of other seeds hold other tokens.

    Raises:
        ValueError: a row too short for needle and question, a depth outside 0..1, no keys, values or fillers, a
            negative offset; from `tokens` and `labels`, no such row or position.
    """

    length: int
    depth: float | None = None
    needle_tokens: int = 4
    keys: int = 16
    values: int = 64
    fillers: int = 64
    offset: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(1, needle_tokens=self.needle_tokens, keys=self.keys, values=self.values, fillers=self.fillers)
        check_least(0, offset=self.offset)
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(f"depth must lie between 0 and 1, or be None for random ones; got {self.depth}")
        if self._room < 0:
            needed = self.length - self._room
            raise ValueError(
                f"a row of {self.length} tokens is too short for a needle of {self.needle_tokens} tokens behind a key, "
                f"and the same again as the answer; give at least {needed}"
            )

    @property
    def vocab_size(self) -> int:
        """All tokens lie below it."""
        return self.offset + self.keys + self.values + self.fillers

    def tokens(self, row: int, positions: Tensor) -> Tensor:
        """The tokens at `positions` [T] of a row: int64 [T]."""
        return tensor(self._tokens(row, checked(self.length, row, positions)))

    def labels(self, row: int, positions: Tensor) -> Tensor:
        """The value's next token on each of `positions` [T] in the question, else `IGNORE`: int64 [T]."""
        at = checked(self.length, row, positions)
        asked = (at >= self._question) & (at < self.length - 1)
        return tensor(np.where(asked, self._tokens(row, at + 1), IGNORE))

    @property
    def _question(self) -> int:
        """Where the last key stands."""
        return self.length - 1 - self.needle_tokens

    @property
    def _room(self) -> int:
        """The last place at which a needle may start."""
        return self._question - 1 - self.needle_tokens

    def _start(self, row: int) -> int:
        """Where the needle starts."""
        if self.depth is not None:
            return round(self.depth * self._room)
        return int(draw(self._key("depth", row), np.zeros(1, np.int64), self._room + 1)[0])

    def _tokens(self, row: int, at: Index) -> Index:
        # Place 0 of the needle is its key; elsewhere in the row, `within` is below 0 or too large.
        within = at - np.where(at < self._question, self._start(row), self._question)
        key = draw(self._key("key", row), np.zeros_like(at), self.keys)
        value = self.keys + draw(self._key("value", row), within, self.values)
        filler = self.keys + self.values + draw(self._key("filler", row), at, self.fillers)
        outside = (within < 0) | (within > self.needle_tokens)
        return self.offset + np.where(outside, filler, np.where(within == 0, key, value))

    def _key(self, what: str, row: int) -> str:
        return f"needle's {what}, row {row}, seed {self.seed}"
