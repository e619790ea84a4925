"""Rotary position embedding (RoFormer, arXiv 2104.09864), from explicit global positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from armillary.models.layers.rope_scaling import RopeScaling, plain_frequencies


@dataclass(frozen=True)
class RotaryEmbedding:
    """Cosines and sines [T, 1, D / 2] of the angles by which RoPE rotates the heads of T tokens.

    They are [B, T, 1, D / 2] if rows have their own positions, and include a scaling's amplitude. Dims i and i + D/2
    make a pair, as in Hugging Face's weights (Meta's own pair 2i and 2i + 1).
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(
        cls,
        positions: Tensor,
        head_dim: int,
        theta: float,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> RotaryEmbedding:
        """Returns the angles position * theta^(-2i / D) of pair i, or those of a scaling.

        Args:
            positions: integers [T] or [B, T], as large as float64 represents exactly (2^53).
            head_dim: D.
            dtype: of the model; cosines and sines have it, or float32 if it is narrower.
            scaling: other frequencies, and a factor for cosines and sines.
        """
        # A float32 frequency is off by up to 6e-8 of itself: at position 5,000,000 that is 0.3 radians.
        frequencies = plain_frequencies if scaling is None else scaling.frequencies
        angles = positions.double()[..., None, None] * frequencies(head_dim, theta, positions.device)
        cos, sin = angles.cos(), angles.sin()
        if scaling is not None and scaling.amplitude != 1:
            cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
        wide = torch.promote_types(dtype, torch.float32)
        return cls(cos.to(wide), sin.to(wide))

    def of_tokens(self, tokens: slice) -> RotaryEmbedding:
        """Returns the angles of some of the tokens."""
        return RotaryEmbedding(self.cos[..., tokens, :, :], self.sin[..., tokens, :, :])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates each head of `x` [B, T, H, D] by its token's angles; rounds once, to the dtype of `x`."""
        if torch.compiler.is_compiling():  # a graph fuses it anyway, and in torch 2.11's a Function's gradient was 0
            return turned(x, self.cos, self.sin, 1)
        return cast(Tensor, cast(Any, Turn).apply(x, self.cos, self.sin))


class Turn(torch.autograd.Function):
    """RoPE, a linear map whose transpose rotates backwards: backward needs no x, and angles have no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turned(x, cos, sin, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return turned(*grad_outputs, *ctx.saved_tensors, sign=-1), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotates x by its angles times `sign`."""
    a, b = x.chunk(2, dim=-1)
    parts = torch.addcmul(a * cos, b, sin, value=-sign), torch.addcmul(b * cos, a, sin, value=sign)
    return torch.cat(parts, dim=-1).to(x.dtype)
