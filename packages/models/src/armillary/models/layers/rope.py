"""Rotary position embedding (RoFormer, arXiv 2104.09864), from explicit positions, and scalings of its frequencies.

Scalings are for sequences longer than in pre-training. Their fields have the names and meanings of Hugging Face's
`rope_parameters`. The original length is the sequence length of pre-training, `original_max_position_embeddings`. A
pair of dims with frequency f makes f L / (2 pi) turns in L tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from armillary.core.internal import check_bool, number


@dataclass(frozen=True)
class RotaryEmbedding:
    """Cosines and sines of the angles by which RoPE rotates the heads of T tokens.

    Dims i and i + D / 2 of a head make a pair, as in Hugging Face's weights (in Meta's own weights, dims 2i and 2i + 1
    do).
    """

    # [T, 1, D / 2], or [B, T, 1, D / 2] if rows have different positions; times the scaling's amplitude.
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
            dtype: dtype of the model. Cosines and sines have this dtype, or float32 if it is narrower.
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
        return RotaryEmbedding(self.cos[..., tokens, :, :], self.sin[..., tokens, :, :])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates each head of `x` [B, T, H, D] by its token's angles; rounds once, to the dtype of `x`."""
        # Inductor fuses `rotate`, so a graph needs no Function; and in torch 2.11 a compiled Function's gradient was 0.
        if torch.compiler.is_compiling():
            return rotate(x, self.cos, self.sin, 1)
        return cast(Tensor, cast(Any, Rotate).apply(x, self.cos, self.sin))


class Rotate(torch.autograd.Function):
    """RoPE as an autograd function that does not save x: backward rotates the gradient by the negative angles."""

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


# -- frequencies ------------------------------------------------------------------------------------------------------


class RopeScaling(Protocol):
    """RoPE's frequencies, and a factor for cosines and sines. Implementations are hashable values."""

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines, by default 1. Attention scores grow by its square."""
        return 1.0

    @property
    def latent_score_factor(self) -> float:
        """Factor of all attention scores in multi-head latent attention, by default 1."""
        return 1.0

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        """Returns the frequency of each pair of dims, in radians per position: float64 [D / 2]."""
        ...


def plain_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Returns RoPE's frequencies without scaling, theta^(-2i / D) for pair i: float64 [D / 2]."""
    dims = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)  # 2i
    return theta ** (-dims / head_dim)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Divides every frequency by `factor` (position interpolation, arXiv 2306.15595).

    Raises:
        ValueError: the factor is not a finite number above 0.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive(self)

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        return plain_frequencies(head_dim, theta, device) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """LLaMA 3.1's scaling: divides low frequencies by `factor`, keeps high ones, and blends linearly in between.

    Args:
        factor: divisor of low frequencies.
        low_freq_factor: number of turns in the original length below which a frequency is low.
        high_freq_factor: number of turns in the original length above which a frequency is high.
        original_max_position_embeddings: the original length.

    Raises:
        ValueError: a field is not a finite number above 0, or high_freq_factor is not above low_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"high_freq_factor={high} must be above low_freq_factor={low}")

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        plain = plain_frequencies(head_dim, theta, device)
        # `high` is 1 for high frequencies, 0 for low ones, and linear in the number of turns in between.
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        high = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (high + (1 - high) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): divides low frequencies, as LLaMA 3.1 does, and enlarges attention scores.

    The blend between low and high frequencies is linear in the pair's index; in LLaMA 3.1 it is linear in the turns.

    Args:
        factor: divisor of low frequencies.
        original_max_position_embeddings: the original length.
        attention_factor: factor of cosines and sines; by default 1 + ln(factor) / 10, as in the paper, but at least 1.
        beta_fast, beta_slow: numbers of turns in the original length: above beta_fast a frequency is high, below
            beta_slow it is low.
        truncate: True lets the blend begin and end at whole pairs.
        mscale, mscale_all_dim: if both are given and factor is above 1, the default attention factor is
            (1 + mscale ln(factor) / 10) / (1 + mscale_all_dim ln(factor) / 10) (DeepSeek). In multi-head latent
            attention, scores grow by the square of the divisor.

    Raises:
        ValueError: a number is not finite and above 0, beta_fast is below beta_slow, or `truncate` is not a bool.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        check_positive(self)
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def latent_score_factor(self) -> float:
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        plain = plain_frequencies(head_dim, theta, device)
        if theta <= 1:
            raise ValueError(f"rope_theta={theta}: YaRN needs more than 1, for frequencies that fall")
        # Frequencies fall with the pair's index. Pairs before `first` keep theirs, those after `last` are divided by
        # `factor`. `low` rises from 0 to 1 in between.
        first = self._pair_at(self.beta_fast, head_dim, theta)
        last = self._pair_at(self.beta_slow, head_dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last = last + 0.001 if first == last else last  # as in transformers, avoids a division by 0
        pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
        low = ((pairs - first) / (last - first)).clamp(0, 1)
        return plain * (1 - low + low / self.factor)

    def _mscale(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _pair_at(self, turns: float, head_dim: int, theta: float) -> float:
        """Returns the (fractional) index of the pair that makes `turns` turns in the original length."""
        # Solves length theta^(-2i / D) / (2 pi) = turns for i.
        length = self.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def check_positive(scaling: LinearScaling | Llama3Scaling | YarnScaling) -> None:
    """Raises ValueError unless each field is a finite number above 0, or None if None is its default."""
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if field.name == "truncate":
            check_bool("truncate", value)
        elif not (value is None and field.default is None) and number(field.name, value) <= 0:
            raise ValueError(f"{type(scaling).__name__}: {field.name}={value!r} must be a number above 0")
