"""The interface of synthetic tasks, and random numbers by position."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from armillary.data.loader.batch import IGNORE
from armillary.data.shuffle import Index, random_bits


class Task(ABC):
    """Rows of `length` tokens, numbered without end. Any token can be computed on its own.

    `repr` of a task names everything that its rows depend on; states of loaders are compared by it.
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
        """Mask [T] of the positions whose next token a model has to answer."""

    def tokens(self, row: int, positions: Tensor) -> Tensor:
        """Returns the tokens at `positions` [T] of a row: int64 [T], on the CPU.

        Raises:
            ValueError: a negative row, or a position outside of the row.
        """
        return torch.from_numpy(self._tokens(row, self._indices(row, positions)))

    def labels(self, row: int, positions: Tensor) -> Tensor:
        """Returns the answer at each of `positions` [T] that asks for one, else `IGNORE`: int64 [T], on the CPU.

        Raises:
            ValueError: a negative row, or a position outside of the row.
        """
        indices = self._indices(row, positions)
        answers = self._tokens(row, np.minimum(indices + 1, self.length - 1))  # the last position never asks
        return torch.from_numpy(np.where(self._asks(indices), answers, IGNORE))

    def _indices(self, row: int, positions: Tensor) -> Index:
        if row < 0:
            raise ValueError(f"row must be at least 0; got {row}")
        indices = positions.to("cpu", torch.int64).numpy()
        for position in (int(indices.min()), int(indices.max())) if len(indices) else ():
            if not 0 <= position < self.length:
                raise ValueError(f"position {position} is not one of the {self.length} positions 0..{self.length - 1}")
        return indices


def draw(key: str, indices: Index, n: int) -> Index:
    """Returns a random number below `n` for each of `indices`: a hash of the key and the index.

    A generator would have to run from the start of a row on every rank. The bias is n / 2**64.
    """
    return (random_bits(key, indices) % np.uint64(n)).astype(np.int64)
