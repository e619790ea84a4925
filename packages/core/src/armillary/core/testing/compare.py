"""Comparing with an oracle in a way that a small wrong gradient cannot hide in."""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64. Any NaN makes it infinite.

    An expected zero tensor gives 0 for zeros and infinity for anything else.
    """
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = torch.linalg.vector_norm(got.double() - expected.double()).item()
    norm = torch.linalg.vector_norm(expected.double()).item()
    if isnan(difference):
        return float("inf")
    return difference / norm if norm else (float("inf") if difference else 0.0)
