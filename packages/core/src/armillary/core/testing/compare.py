"""Comparison with an oracle that a small wrong gradient cannot pass."""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of `expected`, in float64. Any NaN makes it infinite.

    Where `expected` is zero, returns 0 for zeros and infinity for anything else.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    difference = torch.linalg.vector_norm(actual.double() - expected.double()).item()
    norm = torch.linalg.vector_norm(expected.double()).item()
    if isnan(difference):
        return float("inf")
    return difference / norm if norm else (float("inf") if difference else 0.0)
