"""The arithmetic of a short convolution over runs of tokens that have their halo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


def convolve_runs(runs: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """Returns the causal depthwise convolution [B, T, C] at the tokens of all runs, without outputs at halo tokens.

    Args:
        runs: [sum(lengths), B, C], or [sum(lengths), C] with B = 1; each run begins with its W - 1 halo tokens.
        weight, bias: [C, W] and [C], for C channels and W taps.
        lengths: number of tokens of each run with its halo.
    """
    # One convolution over all runs. Outputs at halo tokens mix two runs, and are dropped.
    channels = runs.permute(1, 2, 0) if runs.ndim == 3 else runs.T.unsqueeze(0)  # [B, C, sum(lengths)]
    convolved = F.conv1d(channels, weight.unsqueeze(1), bias, groups=weight.shape[0]).movedim(2, 1)
    starts, halo = accumulate(lengths, initial=0), weight.shape[1] - 1
    outputs = torch.cat([torch.arange(a, a + n - halo) for a, n in zip(starts, lengths, strict=False)])
    return convolved.index_select(1, outputs.to(convolved.device))
