"""How RoPE's frequencies are changed for longer sequences than a model was first trained on.

Fields are named as in Hugging Face's `rope_parameters`, and mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from armillary.core.validation import flag, number


class RopeScaling(Protocol):
    """Frequencies, and what cosines and sines are multiplied by. A value: hashable and comparable."""

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by: scores then grow by its square."""
        ...

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        """Radians by which each pair turns from one position to the next, float64 [D / 2]."""
        ...


def plain_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """theta^(-2i / D) for pair i, float64 [D / 2]."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    return theta ** (-pairs / head_dim)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every pair turns `factor` times more slowly (position interpolation, arXiv 2306.15595).

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
    """LLaMA 3.1's: slow pairs turn `factor` times more slowly, fast ones as before, those between by a blend.

    Args:
        factor: how much more slowly.
        low_freq_factor: a pair is slow that turns fewer times than this in the original length.
        high_freq_factor: and fast that turns more often than this.
        original_max_position_embeddings: the length that was trained before.

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
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (fast + (1 - fast) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a blend over pairs as LLaMA 3.1's, and larger scores.

    Args:
        factor: how much more slowly the slow pairs turn.
        original_max_position_embeddings: the length that was trained before.
        attention_factor: what cosines and sines are multiplied by; by default 1 + ln(factor) / 10, as the paper has it.
        beta_fast, beta_slow: turns in the original length above which a pair is fast, and below which it is slow.
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
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def frequencies(self, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        plain = plain_frequencies(head_dim, theta, device)
        first = self._pair_turning(self.beta_fast, head_dim, theta)
        last = self._pair_turning(self.beta_slow, head_dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last = last + 0.001 if first == last else last  # as transformers has it, not to divide by 0
        pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
        slow = ((pairs - first) / (last - first)).clamp(0, 1)
        return plain * (1 - slow + slow / self.factor)

    def _grown(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _pair_turning(self, turns: float, head_dim: int, theta: float) -> float:
        """Which pair, as a fraction, turns so many times in the original length."""
        length = self.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def check_positive(scaling: LinearScaling | Llama3Scaling | YarnScaling) -> None:
    """Raises ValueError for a field that is not a finite number above 0, nor None where that is its default."""
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if field.name == "truncate":
            flag("truncate", value)
        elif not (value is None and field.default is None) and number(field.name, value) <= 0:
            raise ValueError(f"{type(scaling).__name__}: {field.name}={value!r} must be a number above 0")
