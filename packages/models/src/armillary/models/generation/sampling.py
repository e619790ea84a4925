"""From logits to the next token: the likeliest, or one drawn from the likely ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from armillary.core.accumulate import accumulation_dtype


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from this many of the likeliest tokens.
        top_p: and of these from the fewest likeliest that have this probability together (Holtzman et al., 2020).

    Raises:
        ValueError: a temperature below 0, top_k below 1, top_p not in (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: it must be at least 0, and 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: it must be above 0 and at most 1")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Logits [B, V] -> tokens [B]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of every token to be drawn: [B, V] -> [B, V], in float32 at least. Where temperature is above 0."""
        # Largest first, less the largest: a tiny temperature must not overflow.
        scores, order = logits.to(accumulation_dtype(logits.dtype)).sort(dim=-1, descending=True, stable=True)
        scores = (scores - scores[:, :1]) / self.temperature
        if self.top_k is not None:
            scores[:, self.top_k :] = -torch.inf
        found = scores.softmax(-1)
        if self.top_p is not None:
            found = found.masked_fill(found.cumsum(-1) - found >= self.top_p, 0)
            found = found / found.sum(-1, keepdim=True)
        return torch.zeros_like(found).scatter_(-1, order, found)
