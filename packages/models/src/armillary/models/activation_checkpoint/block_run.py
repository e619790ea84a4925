"""`BlockRun`: forward, backward and recomputation of one block under a checkpoint policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from armillary.attention.parts import GradientSums, RNGReplay
from armillary.core import label
from armillary.models.activation_checkpoint.segments import Keep
from armillary.models.block import Block, Context
from armillary.models.layers import chunked


@dataclass
class BlockRun(ABC):
    """One run of a block, forward and backward, which can be repeated.

    Args:
        keep: which tensors to store for backward.
        chunk, prefetch: as in `Checkpointing`.
        draws: state of the random number generators, from which recomputation draws the same numbers.
    """

    needs_output: ClassVar[bool]
    """True if `differentiate` needs attention's out and lse; False if it recomputes the whole block from x."""

    block: Block
    context: Context
    keep: Keep
    chunk: int | None
    prefetch: bool
    draws: RNGReplay = field(default_factory=RNGReplay, kw_only=True)

    def replay(self) -> Self:
        """Returns the same run with the random numbers of its first forward."""
        return replace(self, draws=self.draws.restart())

    @property
    def gathered_ranks(self) -> int:
        return self.block.gathered_ranks

    @abstractmethod
    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the mixer's out [B, T, H, D], and attention's lse [B, T, H] (an empty tensor for other mixers)."""

    def after_attention(self, x: Tensor, out: Tensor, buffer: Tensor | None) -> Tensor:
        """Computes the block's result [B, T, E] from its input and attention's output, in chunks of tokens.

        Args:
            buffer: memory for the result; None allocates it.
        """
        with label("mlp"):
            return chunked.forward(
                self.block.after_attention, (x, out), self.draws, self.chunk, buffer, self.gathered_ranks
            )

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (the block's result, out, lse)."""

    @abstractmethod
    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, needs_dx: bool
    ) -> None:
        """Runs the block's backward.

        Args:
            x: the block's input.
            output: (out, lse), or empty unless `needs_output`.
            dx: on entry the gradient dy of the block's result; overwritten by the gradient of x.
            totals: sums to which the gradients of the parameters are added.
            needs_dx: False if x requires no gradient: then `dx` is only read.
        """
