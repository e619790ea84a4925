"""The interface of synthetic tasks, and `draw`, random numbers that are a function of the position."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from armillary.data.loader.batch import IGNORE
from armillary.data.shuffle import Index, random_bits


class Task(ABC):
    """Rows of `length` tokens, numbered without end. Each token can be computed without the others.

    `repr` of a task must name everything on which its rows depend: loaders save it in their state, and refuse a state
    with another one.
    """

    length: int

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Vocabulary size; a model may have a larger one."""

    @abstractmethod
    def _tokens(self, row: int, positions: Index) -> Index:
        """Tokens at valid positions [T] of a row: int64 [T]."""

    @abstractmethod
    def _asks(self, positions: Index) -> npt.NDArray[np.bool_]:
        """Mask [T] of the positions at which a model has to predict the next token."""

    def tokens(self, row: int, positions: Tensor) -> Tensor:
        """Returns the tokens at `positions` [T] of a row: int64 [T], on the CPU.

        Raises:
            ValueError: a negative row, or a position outside of the row.
        """
        return torch.from_numpy(self._tokens(row, self._indices(row, positions)))

    def labels(self, row: int, positions: Tensor) -> Tensor:
        """Returns the next token at each of `positions` [T] that asks for it, else `IGNORE`: int64 [T], on the CPU.

        Raises:
            ValueError: a negative row, or a position outside of the row.
        """
        indices = self._indices(row, positions)
        answers = self._tokens(row, np.minimum(indices + 1, self.length - 1))  # the last position never asks
        return torch.from_numpy(np.where(self._asks(indices), answers, IGNORE))

    def _indices(self, row: int, positions: Tensor) -> Index:
        """Returns the positions as an array on the host, after checking the row and the positions."""
        if row < 0:
            raise ValueError(f"row must be at least 0; got {row}")
        indices = positions.to("cpu", torch.int64).numpy()
        for position in (int(indices.min()), int(indices.max())) if len(indices) else ():
            if not 0 <= position < self.length:
                raise ValueError(f"position {position} is not one of the {self.length} positions 0..{self.length - 1}")
        return indices


def draw(key: str, indices: Index, n: int) -> Index:
    """Returns a random number in 0..n - 1 for each of `indices`, int64: a hash of the key and the index.

    So each rank computes the numbers of its own positions; a generator would have to run from the start of a row.
    Because of the modulo, probabilities differ from 1 / n by a relative error of at most n / 2**64.
    """
    return (random_bits(key, indices) % np.uint64(n)).astype(np.int64)
