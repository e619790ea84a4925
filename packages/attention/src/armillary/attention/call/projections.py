"""The interface between a model and `Method.projected`: from hidden states to requested heads of q, k and v."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.recompute import capture_autocast


class Projections(Protocol):
    """From local hidden states x [B, T, E] to heads, including norm, bias, RoPE and LoRA.

    Any heads can be requested, in any order, so that a method does not need all of them at once.
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
        """Returns the current tensors that q and kv depend on besides x: FSDP swaps parameters."""
        ...


@runtime_checkable
class TokenProjections(Projections, Protocol):
    """Projections of a subset of tokens, so that intermediates between x and q never exist for all tokens."""

    def of_tokens(self, tokens: slice) -> Self:
        """Returns the same projections for `x[:, tokens]`."""
        ...


class CacheableProjections(Projections, Protocol):
    """Projections with a cache key for the dims and dtypes of q, k and v, so that equal calls are checked once."""

    def cache_key(self) -> Hashable | None:
        """Returns a key of everything that dims and dtypes depend on besides x and autocast; None if unknown.

        Equal keys mean equal dims and dtypes, and equal errors. A key does not depend on values.
        """
        ...


class CollectsGradients(Projections, Protocol):
    """Projections that can add weight gradients of a few heads and tokens to sums, without a full-size temporary."""

    def collecting(self, totals: GradientSums) -> Self:
        """Returns projections whose backward adds weight gradients to `totals` instead of returning them."""
        ...


@torch.no_grad()
def one_token(x: Tensor, projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one head of q, k and v, to read dims and dtypes; of one token if the projections allow."""
    first = slice(0, 1)
    if isinstance(projections, TokenProjections):
        x, projections = x[:, first], projections.of_tokens(first)
    with capture_autocast(x.device.type)():
        return projections.q(x, range(1)), *projections.kv(x, range(1))
