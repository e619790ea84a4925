"""The seam between a model and a method: what a method may be handed instead of finished q, k and v."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Projections(Protocol):
    """From hidden states x [B, T, E] of this rank's tokens to heads, with bias, norm, RoPE and LoRA between.

    Any range of heads can be asked for, so that a method need not hold all of them at once.
    """

    @property
    def heads(self) -> int:
        """Query heads, H."""
        ...

    @property
    def key_heads(self) -> int:
        """Key/value heads, K."""
        ...

    def q(self, x: Tensor, heads: range) -> Tensor:
        """[B, T, len(heads), D]"""
        ...

    def kv(self, x: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """[B, T, len(heads), D] and [B, T, len(heads), Dv]"""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """All that q and kv depend on besides x."""
        ...
