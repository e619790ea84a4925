"""The next token from logits: the most likely, or a random draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.core import accumulation_dtype
from armillary.core.validation import integer, number


@dataclass(frozen=True)
class Sampling:
    """Options for the choice of the next token.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws only from the `top_k` most likely tokens.
        top_p: draws only from the most likely tokens, as few as have a total probability of at least `top_p` (Holtzman
            et al., 2020).

    Raises:
        ValueError: the temperature is below 0 or not finite, top_k is not an integer of at least 1, or top_p is not
            in (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if number("temperature", self.temperature) < 0:
            raise ValueError(f"temperature={self.temperature}: it must be at least 0 (most likely token)")
        if self.top_k is not None:
            integer("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p={self.top_p}: it must be above 0 and at most 1")

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Returns the next token of each row, logits [B n, V] -> [B n].

        Args:
            generators: one for each of the n completions of a prompt. Row b n + j is drawn with the j-th one.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits).unflatten(0, (-1, len(generators)))
        # One call for all B rows of a generator: a run with this generator alone draws the same numbers.
        drawn = [
            torch.multinomial(probabilities[:, j], 1, generator=generator) for j, generator in enumerate(generators)
        ]
        return torch.cat(drawn, 1).flatten()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns each token's probability, logits [B, V] -> [B, V], in float32 or wider. Not for temperature 0."""
        # Sorted, the most likely token first. Its logit is subtracted, so that a tiny temperature does not overflow.
        scores, order = logits.to(accumulation_dtype(logits.dtype)).sort(dim=-1, descending=True, stable=True)
        scores = (scores - scores[:, :1]) / self.temperature
        if self.top_k is not None:
            scores[:, self.top_k :] = -torch.inf
        probabilities = scores.softmax(-1)
        if self.top_p is not None:
            # Drops a token if the more likely ones have probability top_p or more together. The first one always stays.
            probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= self.top_p, 0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)
