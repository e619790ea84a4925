"""A block with a state under a checkpoint policy: keeps x, and recomputes its mixer under autograd in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from armillary.attention.call.gradient_sums import GradientSums
from armillary.attention.call.recompute import RNGReplay
from armillary.core import label
from armillary.models.activation_checkpoint.segments import Keep
from armillary.models.block import Block, Context, attend
from armillary.models.layers import chunked


class Options(Protocol):
    """The options of `Checkpointing` that a run reads."""

    @property
    def chunk(self) -> int | None: ...

    @property
    def prefetch(self) -> bool: ...


@dataclass
class StateRun:
    """One run of a block whose mixer has a state, forward and backward."""

    needs_output = False

    options: Options
    keep: Keep
    block: Block
    context: Context
    draws: RNGReplay = field(default_factory=RNGReplay)

    @classmethod
    def of(cls, options: Options, keep: Keep, block: Block, x: Tensor, context: Context) -> StateRun:
        return cls(options, replace(keep, attention_output=False), block, context)

    def replay(self) -> StateRun:
        """Returns the same run with the random numbers of its first forward."""
        return replace(self, draws=self.draws.again())

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the mixer's out, with an empty tensor in place of attention's lse."""
        with self.draws.at("mixer", x.device):
            return attend(self.block, x, self.context), x.new_empty(0)

    def after_attention(self, x: Tensor, out: Tensor, buffer: Tensor | None) -> Tensor:
        """Computes the block's result."""
        with label("mlp"):
            return chunked.forward(
                self.block.after_attention, (x, out), self.draws, self.options.chunk, buffer, self.block.gathered_ranks
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (the block's result, out, an empty tensor)."""
        out, lse = self.attend(x)
        return self.after_attention(x, out, None), out, lse

    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, wants_dx: bool
    ) -> None:
        """Turns dx, which holds dy on entry, into the gradient of x."""
        leaf = x.detach().requires_grad_(wants_dx)
        with torch.enable_grad():
            out, _ = self.attend(leaf)
        # 1. The token-wise part, which overwrites dx by its gradient and the residual's, and writes dout.
        dout = torch.empty_like(out) if out.requires_grad else None
        with label("mlp"):
            chunking = self.options.chunk, self.block.gathered_ranks
            grads = (dx if wants_dx else None, dout)
            chunked.backward(self.block.after_attention, (x, out.detach()), dx, grads, totals, self.draws, *chunking)
        if dout is None:
            return
        # 2. The mixer, which adds to dx.
        with label("attention"):
            sources = [*([leaf] if wants_dx else []), *totals.parameters]
            gradients: list[Tensor | None] = list(torch.autograd.grad(out, sources, dout, allow_unused=True))
            totals.add(gradients[len(sources) - len(totals.parameters) :])
        if wants_dx and (mixer_dx := gradients[0]) is not None:
            dx += mixer_dx
