"""Comparison of tensors with an oracle, relative to the norm of the expected tensor: small gradients count too."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

LIMITS = {torch.float64: 1e-10, torch.float32: 2e-6}
"""Largest relative error of attention's results and gradients, by dtype. Errors in 16 bits depend on the tensors, and
have no fixed limit."""


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Returns the root mean square of the difference over that of `expected`, in float64.

    Infinite for a NaN, for any difference if the divisor is 0, and if -inf is not at the same places in both: an lse is
    -inf where a query sees no key.

    Args:
        floor: the divisor if the root mean square of `expected` is smaller.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    unseen = expected == -torch.inf
    if not torch.equal(actual == -torch.inf, unseen):
        return float("inf")
    expected = expected.detach().double().masked_fill(unseen, 0)
    difference = root_mean_square(actual.detach().double().masked_fill(unseen, 0) - expected)
    if not difference:
        return 0.0
    divisor = max(root_mean_square(expected), floor)
    return difference / divisor if isfinite(difference) and divisor else float("inf")


def root_mean_square(x: Tensor) -> float:
    """Returns the root mean square of a tensor's numbers, computed in float64; 0 if it has none."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0
