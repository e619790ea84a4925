"""Dense reference attention: the visibility of each pair is computed from global positions."""

from math import sqrt

import torch
from torch import Tensor


class DenseAttention:
    """Maps q [B, T, H, D] and k, v [B, T, K, D] of the tokens at `positions` [T] to out [B, T, H, D]."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def __call__(self, q, k, v, *, mask, layout):
        visible = mask.visible(self.positions, self.positions)
        return torch.stack([self.head(q, k, v, h, visible) for h in range(q.shape[2])], dim=2)

    def head(self, q, k, v, h, visible):
        group = h // (q.shape[2] // k.shape[2])
        scores = q[:, :, h] @ k[:, :, group].mT / sqrt(q.shape[3])
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, :, group]
