"""The seam between a model and a method: what a method may be handed instead of finished q, k and v."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from armillary.core.accumulate import Totals
from armillary.core.recompute import capture_autocast


class Projections(Protocol):
    """From hidden states x [B, T, E] of this rank's tokens to heads, with norm, bias, RoPE and LoRA between.

    Any heads can be asked for, in any order, so that a method need not hold all of them at once.
    """

    @property
    def heads(self) -> int:
        """Query heads, H."""
        ...

    @property
    def key_heads(self) -> int:
        """Key/value heads, K."""
        ...

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """[B, T, len(heads), D]"""
        ...

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[B, T, len(heads), D] and [B, T, len(heads), Dv]"""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """All that q and kv depend on besides x, as it is at the time of asking (FSDP swaps parameters)."""
        ...


@runtime_checkable
class TokenProjections(Projections, Protocol):
    """Projections that can be had of some tokens alone, and so need not hold what lies between x and q for all."""

    def of_tokens(self, tokens: slice) -> Self:
        """The same projections, for `x[:, tokens]`."""
        ...


class KnowsResults(Projections, Protocol):
    """Projections that say what the dims and dtypes of q, k and v follow from, so that calls are checked once."""

    def made_of(self) -> Hashable | None:
        """All that these follow from besides x and autocast, as it is at the time of asking; None if it can't be known.

        Nothing that identifies data: what is equal gives results of equal dims and dtypes, and is refused alike.
        """
        ...


class CollectsGradients(Projections, Protocol):
    """Projections whose weights' gradients need not be as large as the weights for a few heads of a few tokens."""

    def collecting(self, totals: Totals) -> Self:
        """The same projections, whose backward adds to `totals` itself what autograd then has no gradient for."""
        ...


@torch.no_grad()
def one_token(x: Tensor, projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """One head of q, k and v, of one token if the projections know single tokens: to see their dims and dtypes."""
    first = slice(0, 1)
    if isinstance(projections, TokenProjections):
        x, projections = x[:, first], projections.of_tokens(first)
    with capture_autocast(x.device.type)():
        return projections.q(x, range(1)), *projections.kv(x, range(1))
