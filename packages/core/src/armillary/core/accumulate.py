"""The dtype in which partial results are accumulated."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate results of `dtype` in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
