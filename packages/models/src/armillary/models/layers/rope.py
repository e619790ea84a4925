"""Rotary position embedding (RoFormer, arXiv 2104.09864), from explicit positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from armillary.models.layers.rope_scaling import RopeScaling, plain_frequencies


@dataclass(frozen=True)
class RotaryEmbedding:
    """Cosines and sines of the angles by which RoPE rotates the heads of T tokens.

    Dims i and i + D / 2 of a head make a pair, as in Hugging Face's weights (in Meta's own weights, dims 2i and 2i + 1
    do).

    Args:
        cos, sin: [T, 1, D / 2], or [B, T, 1, D / 2] if rows have different positions; multiplied by
            `RopeScaling.amplitude` if there is a scaling.
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
        """Returns cosines and sines of position * f_i for pair i; f_i is theta^(-2i / D), or the scaling's frequency.

        Args:
            positions: integers [T] or [B, T], up to 2^53 (exact in float64).
            head_dim: D.
            theta: the base of the frequencies.
            dtype: dtype of the model. Cosines and sines have this dtype, or float32 if it is narrower.
            scaling: replaces the frequencies, and may scale cosines and sines.
        """
        # In float64: a float32 frequency has a relative error of up to 6e-8: 0.3 radians at position 5,000,000.
        frequencies = plain_frequencies if scaling is None else scaling.frequencies
        angles = positions.double()[..., None, None] * frequencies(head_dim, theta, positions.device)
        cos, sin = angles.cos(), angles.sin()
        if scaling is not None and scaling.amplitude != 1:
            cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
        wide = torch.promote_types(dtype, torch.float32)
        return cls(cos.to(wide), sin.to(wide))

    def of_tokens(self, tokens: slice) -> RotaryEmbedding:
        """Returns the cosines and sines of a slice of the tokens."""
        return RotaryEmbedding(self.cos[..., tokens, :, :], self.sin[..., tokens, :, :])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates each head of `x` [B, T, H, D] by its token's angles; rounds once, to the dtype of `x`."""
        # Inductor fuses `rotate`, so a graph needs no Function; and in torch 2.11 a compiled Function's gradient was 0.
        if torch.compiler.is_compiling():
            return rotate(x, self.cos, self.sin, 1)
        return cast(Tensor, cast(Any, Rotate).apply(x, self.cos, self.sin))


class Rotate(torch.autograd.Function):
    """RoPE as an autograd function that does not save x: backward rotates the gradient by the negative angles.

    Cosines and sines have no gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return rotate(*grad_outputs, *ctx.saved_tensors, sign=-1), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotates each pair of x [B, T, H, D] by `sign` times its angle."""
    a, b = x.chunk(2, dim=-1)  # the two dims of all pairs
    # a cos - b sin and b cos + a sin.
    halves = torch.addcmul(a * cos, b, sin, value=-sign), torch.addcmul(b * cos, a, sin, value=sign)
    return torch.cat(halves, dim=-1).to(x.dtype)
