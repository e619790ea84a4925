"""A block whose mixer has a state, under a checkpoint policy: stores x, and recomputes the mixer in backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.attention.parts import GradientSums
from armillary.core import label
from armillary.models.activation_checkpoint.block_run import BlockRun
from armillary.models.block import attend
from armillary.models.layers import chunked


class StateRun(BlockRun):
    """One run of a block whose mixer has a state, forward and backward."""

    needs_output = False

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the mixer's out. Returns an empty tensor in place of attention's lse."""
        with self.draws.at("mixer", x.device):
            return attend(self.block, x, self.context), x.new_empty(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (the block's result, out, an empty tensor)."""
        out, lse = self.attend(x)
        return self.after_attention(x, out, None), out, lse

    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, needs_dx: bool
    ) -> None:
        """Overwrites dx, which is dy on entry, by the gradient of x. See `BlockRun.differentiate`."""
        # 1. Recompute the mixer from x, under autograd, which then differentiates it in step 3.
        leaf = x.detach().requires_grad_(needs_dx)
        with torch.enable_grad():
            out, _ = self.attend(leaf)
        # 2. Backward of the token-wise part. Overwrites dx by the gradient through residual and MLP. Also writes dout.
        dout = torch.empty_like(out) if out.requires_grad else None
        with label("mlp"):
            chunking = self.chunk, self.gathered_ranks
            grads = (dx if needs_dx else None, dout)
            chunked.backward(self.block.after_attention, (x, out.detach()), dx, grads, totals, self.draws, *chunking)
        if dout is None:
            return
        # 3. Backward of the norm and the mixer. Adds to dx.
        with label("attention"):
            sources = [*([leaf] if needs_dx else []), *totals.parameters]
            gradients: list[Tensor | None] = list(torch.autograd.grad(out, sources, dout, allow_unused=True))
            totals.add(gradients[len(sources) - len(totals.parameters) :])
        if needs_dx and (mixer_dx := gradients[0]) is not None:
            dx += mixer_dx
