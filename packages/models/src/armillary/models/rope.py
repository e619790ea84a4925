"""Rotary position embedding (RoFormer, arXiv 2104.09864), from explicit global positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The angles by which the heads of T tokens are turned, as cosines and sines [T, 1, D / 2].

    Dims i and i + D/2 make a pair, as in Hugging Face's weights (Meta's own pair 2i and 2i + 1).
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
        """Pair i at position p turns by p * theta^(-2i / D).

        Args:
            positions: integers [T], as large as float64 holds them exactly (2^53).
            head_dim: D.
            dtype: of the model. Cosines and sines come in it, but at least in float32.
        """
        # A float32 frequency is off by up to 6e-8 of itself: at position 5,000,000 that is 0.3 radians.
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
        angles = positions.double()[:, None, None] * theta ** (-pairs / head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(angles.cos().to(wide), angles.sin().to(wide))

    def of_tokens(self, tokens: slice) -> Rotation:
        """The angles of some of the tokens."""
        return Rotation(self.cos[tokens], self.sin[tokens])

    def __call__(self, x: Tensor) -> Tensor:
        """Turns each head of `x` [B, T, H, D] by its token's angles; rounds once, to the dtype of `x`."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)
