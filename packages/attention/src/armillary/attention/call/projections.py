"""The seam between a model and `Method.projected`: hidden states in, heads of q, k and v out, as they are asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.recompute import capture_autocast


class Projections(Protocol):
    """From local hidden states x [B, T, E] to heads, including norm, bias, RoPE and LoRA.

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
        """Returns q [B, T, len(heads), D]."""
        ...

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns k [B, T, len(heads), D] and v [B, T, len(heads), Dv]."""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """Everything that q and kv depend on besides x, as it is when asked: FSDP swaps parameters."""
        ...


@runtime_checkable
class TokenProjections(Projections, Protocol):
    """Projections of some tokens alone, so that nothing between x and q need exist for all tokens."""

    def of_tokens(self, tokens: slice) -> Self:
        """Returns the same projections for `x[:, tokens]`."""
        ...


class KnowsResults(Projections, Protocol):
    """Projections that know the values on which dims and dtypes of q, k and v depend: equal calls are checked once."""

    def made_of(self) -> Hashable | None:
        """Everything that these depend on besides x and autocast, as it is when asked; None if that is unknown.

        It holds no data: equal values mean equal dims and dtypes, and equal errors.
        """
        ...


class CollectsGradients(Projections, Protocol):
    """Projections whose weight gradients for a few heads of a few tokens need not be as large as the weights."""

    def collecting(self, totals: GradientSums) -> Self:
        """Returns projections whose backward adds weight gradients to `totals` instead of giving them to autograd."""
        ...


@torch.no_grad()
def one_token(x: Tensor, projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one head of q, k and v, to read dims and dtypes; of one token where projections take single tokens."""
    first = slice(0, 1)
    if isinstance(projections, TokenProjections):
        x, projections = x[:, first], projections.of_tokens(first)
    with capture_autocast(x.device.type)():
        return projections.q(x, range(1)), *projections.kv(x, range(1))
