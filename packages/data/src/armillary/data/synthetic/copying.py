"""Copying: the second half of a row repeats its first half."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from armillary.data.loader.batches import check_minimum
from armillary.data.shuffle import Index
from armillary.data.synthetic.task import Task, draw


@dataclass(frozen=True)
class Copy(Task):
    """N // 2 random tokens, a separator, and the same tokens again up to the end of the row.

    The tokens after the separator are the labels; each equals the token N // 2 + 1 positions before it. If N is even,
    the row ends before the last token is repeated.

    Args:
        length: N, at least 3.
        symbols: number of different tokens to copy. A guess is right with probability 1 / symbols.
        seed: seed of random tokens.

    Raises:
        ValueError: a length below 3, or no symbols.
    """

    length: int
    symbols: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimum(3, length=self.length)
        check_minimum(1, symbols=self.symbols)

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    def _tokens(self, row: int, positions: Index) -> Index:
        middle = self.length // 2  # position of the separator, whose token is `symbols`
        source = np.where(positions > middle, positions - middle - 1, positions)
        symbols = draw(f"copy, row {row}, seed {self.seed}", source, self.symbols)
        return np.where(positions == middle, self.symbols, symbols)

    def _asks(self, positions: Index) -> npt.NDArray[np.bool_]:
        return (positions >= self.length // 2) & (positions < self.length - 1)
