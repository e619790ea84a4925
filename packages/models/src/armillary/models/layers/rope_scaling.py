"""Scalings of RoPE's frequencies for sequences longer than in pre-training.

Fields have the names and meanings of Hugging Face's `rope_parameters`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from armillary.core.validation import flag, number


class RopeScaling(Protocol):
    """Frequencies, and a factor for cosines and sines. A value: hashable and comparable."""

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines; scores grow by its square."""
        ...

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        """Returns radians per position for each pair, float64 [D / 2]."""
        ...


def plain_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Returns theta^(-2i / D) for pair i, float64 [D / 2]."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    return theta ** (-pairs / head_dim)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divides every frequency by `factor` (position interpolation, arXiv 2306.15595).

    Raises:
        ValueError: a factor that is not above 0.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        return plain_frequencies(head_dim, theta, device) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """LLaMA 3.1's scaling: divides low frequencies by `factor`, keeps high ones, and blends between.

    Args:
        factor: divisor of low frequencies.
        low_freq_factor: frequencies with fewer turns in the original length are low.
        high_freq_factor: frequencies with more turns in the original length are high.
        original_max_position_embeddings: length of pre-training.

    Raises:
        ValueError: a number not above 0, or a high_freq_factor that is not above low_freq_factor.
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

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        plain = plain_frequencies(head_dim, theta, device)
        # Turns of each pair over the length of pre-training: pairs with few turns are interpolated.
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (fast + (1 - fast) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a blend over pairs like LLaMA 3.1's, and larger scores.

    Args:
        factor: divisor of low frequencies.
        original_max_position_embeddings: length of pre-training.
        attention_factor: factor of cosines and sines; by default 1 + ln(factor) / 10, as in the paper.
        beta_fast, beta_slow: turns in the original length above which a frequency is high, and below which it is low.
        truncate: the blend begins and ends at whole pairs.
        mscale, mscale_all_dim: given both, the default attention factor is the ratio of 1 + mscale ln(factor) / 10
            to the same with mscale_all_dim (DeepSeek).

    Raises:
        ValueError: a number not above 0, or a beta_fast below beta_slow.
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

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        plain = plain_frequencies(head_dim, theta, device)
        # Pairs before `first` keep their frequency, pairs after `last` are interpolated, with a ramp between them.
        first = self._pair_at(self.beta_fast, head_dim, theta)
        last = self._pair_at(self.beta_slow, head_dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last = last + 0.001 if first == last else last  # as in transformers, avoids a division by 0
        pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
        slow = ((pairs - first) / (last - first)).clamp(0, 1)
        return plain * (1 - slow + slow / self.factor)

    def _mscale(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _pair_at(self, turns: float, head_dim: int, theta: float) -> float:
        """Returns the (fractional) index of the pair that makes `turns` turns in the original length."""
        length = self.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def check_positive(scaling: LinearScaling | Llama3Scaling | YarnScaling) -> None:
    """Raises ValueError unless each field is a finite number above 0, or None where that is the default."""
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if field.name == "truncate":
            flag("truncate", value)
        elif not (value is None and field.default is None) and number(field.name, value) <= 0:
            raise ValueError(f"{type(scaling).__name__}: {field.name}={value!r} must be a number above 0")
