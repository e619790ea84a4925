"""The next token from logits: the most likely, or a random draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from armillary.core import accumulation_dtype


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws from this many of the most likely tokens.
        top_p: draws from the fewest most likely tokens with this total probability (Holtzman et al., 2020).

    Raises:
        ValueError: a temperature below 0, top_k below 1, top_p not in (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature={self.temperature}: it must be at least 0, and 0 takes the most likely token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: it must be above 0 and at most 1")

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Returns the tokens [B n] for logits [B n, V]: row b n + j draws from the j-th of n generators."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits).unflatten(0, (-1, len(generators)))
        # One call for the B rows of a generator, as in a run with that generator alone.
        drawn = [torch.multinomial(probabilities[:, j], 1, generator=each) for j, each in enumerate(generators)]
        return torch.cat(drawn, 1).flatten()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probability of each token, [B, V] -> [B, V], in float32 at least. The temperature is above 0."""
        # Largest first, less the largest: a tiny temperature must not overflow.
        scores, order = logits.to(accumulation_dtype(logits.dtype)).sort(dim=-1, descending=True, stable=True)
        scores = (scores - scores[:, :1]) / self.temperature
        if self.top_k is not None:
            scores[:, self.top_k :] = -torch.inf
        probabilities = scores.softmax(-1)
        if self.top_p is not None:
            # Drops tokens whose predecessors already have probability top_p; the most likely one always stays.
            probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= self.top_p, 0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)
