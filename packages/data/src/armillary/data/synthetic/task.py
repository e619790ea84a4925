"""What a synthetic task is, and what all of them check."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from armillary.data.shuffle import Index


class Task(Protocol):
    """Rows without end, any token of which can be had by itself.

    Its `repr` says all that decides what the rows hold: that is how a saved state is known to be of the same task.
    """

    @property
    def length(self) -> int:
        """Tokens of a row, N."""
        ...

    @property
    def vocab_size(self) -> int:
        """All tokens lie below it; a model may have more."""
        ...

    def tokens(self, row: int, positions: Tensor) -> Tensor:
        """The tokens at `positions` [T] of row number `row`: int64 [T] on the CPU, whatever else is asked for."""
        ...

    def labels(self, row: int, positions: Tensor) -> Tensor:
        """The token that follows each of `positions` [T] where a model has to know it, else `IGNORE`: int64 [T]."""
        ...


def checked(length: int, row: int, positions: Tensor) -> Index:
    """`positions` [T] as int64 on the CPU.

    Raises:
        ValueError: a row below 0, or a position that no row of `length` tokens has.
    """
    if row < 0:
        raise ValueError(f"rows count from 0; got {row}")
    found = positions.to("cpu", torch.int64)
    for position in (int(found.min()), int(found.max())) if len(found) else ():
        if not 0 <= position < length:
            raise ValueError(f"position {position} is not one of the {length} positions 0..{length - 1}")
    return found.numpy()


def tensor(numbers: Index) -> Tensor:
    """int64, on the CPU, in memory of its own."""
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
