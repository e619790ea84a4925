"""Comparison of tensors with an oracle, relative to the norm of the expected tensor: small gradients count too."""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of `expected`, in float64.

    Infinite if a tensor has a NaN, or if `expected` is zero everywhere and `actual` is not.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    difference = torch.linalg.vector_norm(actual.double() - expected.double()).item()
    norm = torch.linalg.vector_norm(expected.double()).item()
    if isnan(difference):
        return float("inf")
    return difference / norm if norm else (float("inf") if difference else 0.0)
