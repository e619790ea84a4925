"""The interface between a model and `Method.projected`: projections of hidden states to some heads of q, k and v."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.recompute import capture_autocast


class Projections(Protocol):
    """Projects local hidden states x [B, T, E] to heads, including norm, bias, RoPE and LoRA.

    A method may request any heads in any order, so that not all heads need exist at once.
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
        """Returns the parameters that q and kv use. Called whenever they are needed, because FSDP swaps parameters."""
        ...


@runtime_checkable
class TokenProjections(Projections, Protocol):
    """Projections that can project some tokens alone, so that no intermediate exists for all tokens at once."""

    def of_tokens(self, tokens: slice) -> Self:
        """Returns the same projections for `x[:, tokens]`."""
        ...


class CacheableProjections(Projections, Protocol):
    """Projections with a key for the dims and dtypes of q, k and v, so that equal calls are checked once."""

    def cache_key(self) -> Hashable | None:
        """Returns a key such that projections with equal keys give equal dims, dtypes and errors for equal x.

        It does not depend on values of tensors. None if there is no such key.
        """
        ...


class CollectsGradients(Projections, Protocol):
    """Projections that can add the weight gradients of some heads and tokens to sums, without a full-size temporary."""

    def collecting(self, totals: GradientSums) -> Self:
        """Returns projections whose backward adds weight gradients to `totals` instead of returning them."""
        ...


@torch.no_grad()
def one_token(x: Tensor, projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one head of q, k and v, from which dims and dtypes are read.

    Of one token, if the projections are `TokenProjections`; otherwise of all.
    """
    first = slice(0, 1)
    if isinstance(projections, TokenProjections):
        x, projections = x[:, first], projections.of_tokens(first)
    with capture_autocast(x.device.type)():
        return projections.q(x, range(1)), *projections.kv(x, range(1))
