"""`BlockRun`: forward, backward and recomputation of one block under a checkpoint policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.recompute import RNGReplay
from armillary.core import label
from armillary.models.activation_checkpoint.segments import Keep
from armillary.models.block import Block, Context
from armillary.models.layers import chunked


@dataclass
class BlockRun(ABC):
    """One run of a block, forward and backward, which can be repeated.

    Args:
        keep: the tensors to keep for backward.
        chunk, prefetch: as in `Checkpointing`.
        draws: random numbers, which recomputation replays.
    """

    needs_output: ClassVar[bool]
    """True if backward takes attention's output; False if it recomputes the whole block from x."""

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
        """Computes attention's out and lse, or those of the layer in its place."""

    def after_attention(self, x: Tensor, out: Tensor, buffer: Tensor | None) -> Tensor:
        """Computes the block's result."""
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
        """Computes the gradient of x in place: `dx` holds dy on entry. `output` is (out, lse)."""
