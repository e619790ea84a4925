"""Copying: the second half of a row is its first half again."""

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
class Copy:
    """N // 2 random tokens, a separator, and the same tokens again up to the end of the row.

    Labels stand on the second half, from the separator on: each asks for a token that stood N // 2 + 1 places before
    it. Where N is even there is room for all but the last of them.

    Args:
        length: N, at least 3.
        symbols: how many different tokens are copied; guessing is right once in as many.
        offset: the first token's number. Then come `symbols` - 1 more, and the separator.
        seed: rows of other seeds hold other tokens.

    Raises:
        ValueError: length below 3, no symbols, a negative offset; from `tokens` and `labels`, no such row or position.
    """

    length: int
    symbols: int = 64
    offset: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(3, length=self.length)
        check_least(1, symbols=self.symbols)
        check_least(0, offset=self.offset)

    @property
    def vocab_size(self) -> int:
        """All tokens lie below it."""
        return self.offset + self.symbols + 1

    def tokens(self, row: int, positions: Tensor) -> Tensor:
        """The tokens at `positions` [T] of a row: int64 [T]."""
        return tensor(self._tokens(row, checked(self.length, row, positions)))

    def labels(self, row: int, positions: Tensor) -> Tensor:
        """The token that follows on each of `positions` [T] in the second half, else `IGNORE`: int64 [T]."""
        at = checked(self.length, row, positions)
        asked = (at >= self.length // 2) & (at < self.length - 1)
        return tensor(np.where(asked, self._tokens(row, at + 1), IGNORE))

    def _tokens(self, row: int, at: Index) -> Index:
        middle = self.length // 2
        source = np.where(at > middle, at - middle - 1, at)
        drawn = draw(f"copy, row {row}, seed {self.seed}", source, self.symbols)
        return self.offset + np.where(at == middle, self.symbols, drawn)
