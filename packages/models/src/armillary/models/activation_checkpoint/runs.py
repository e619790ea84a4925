"""Forward, backward and recomputation of one block under a checkpoint policy, with attention or with a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from armillary.attention import AttentionSpec, Method, Projected, UPipe
from armillary.attention.parts import GradientSums, RNGReplay
from armillary.core import label
from armillary.models.activation_checkpoint.segments import Keep
from armillary.models.block import Block, Context, attend
from armillary.models.layers import chunked
from armillary.models.layers.projections import ProjectionModule


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

    def differentiate_after_attention(
        self, x: Tensor, out: Tensor, dx: Tensor, dout: Tensor | None, totals: GradientSums, needs_dx: bool
    ) -> None:
        """Backward of `after_attention`, chunk by chunk.

        Args:
            dx: on entry dy; overwritten, if `needs_dx`, by the gradient of x through the residual and the MLP.
            dout: memory for the gradient of out; None if it is not needed.
        """
        with label("mlp"):
            grads, chunking = (dx if needs_dx else None, dout), (self.chunk, self.gathered_ranks)
            chunked.backward(self.block.after_attention, (x, out), dx, grads, totals, self.draws, *chunking)

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


@dataclass
class CheckpointedRun(BlockRun):
    """One run of a block with attention, forward and backward."""

    needs_output = True

    upipe: UPipe
    call: AttentionSpec

    @classmethod
    def of(
        cls, x: Tensor, block: Block, context: Context, keep: Keep, chunk: int | None, prefetch: bool
    ) -> CheckpointedRun:
        """Returns the run of a block on x [B, T, E]. Raises ValueError if attention does not accept the call."""
        method = cast(Method, block.attention)
        # Attention gets the tokens of all tensor-parallel ranks. The check reads only shapes, so a view of x that has
        # as many tokens is enough.
        attention_x = x[:, :1].expand(-1, context.tokens, -1) if block.gathered_ranks > 1 else x
        # `method` checks the call, and not the UPipe below: all blocks share the method, so its cache has the result
        # from the first block. The UPipe is a new object with an empty cache.
        call = method.check_projected(
            attention_x,
            block.projections(context, True),
            mask=context.mask,
            layout=context.layout,
        )
        return cls(block, context, keep, chunk, prefetch, UPipe.for_method(method), call)

    def source(self, x: Tensor, dx: Tensor | None = None, totals: GradientSums | None = None) -> Projected:
        """Returns the source of q, k and v, which projects x for a few heads at a time.

        Args:
            x: the input of the projections (`attention_input`).
            dx: the gradient of x is added to it in backward.
            totals: the gradients of parameters are added to it in backward.
        """
        projections = self.block.projections(self.context, normed=self.gathered_ranks > 1)
        totals = GradientSums() if totals is None else totals
        return Projected(x, projections, self.chunk, dx, totals, self.draws)

    def attention_input(self, x: Tensor) -> Tensor:
        """Returns the input of the projections.

        Without tensor parallelism it is x: the projections apply the norm, again for each stage of heads. Under tensor
        parallelism it is norm(x) of all ranks' tokens, so that the tokens are gathered only once.
        """
        if self.gathered_ranks == 1:
            return x
        normed_x = chunked.forward(self.block.norm, (x,), RNGReplay(), self.chunk, gathered_ranks=self.gathered_ranks)
        return normed_x[:, : self.context.tokens]

    def attend(self, x: Tensor, buffer: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes out and lse, without autograd. `buffer` is memory for out."""
        with label("attention"):
            return self.upipe.attend(self.source(self.attention_input(x)), self.call, buffer)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (the block's result, out, lse). The result overwrites out if it fits and out is not stored."""
        # `key_heads` has an entry for each of this rank's query heads. `tokens` counts the padding of gathered tokens.
        heads, tokens = len(self.call.key_heads), x.shape[1] * self.gathered_ranks
        width = self.gathered_ranks * heads * cast(ProjectionModule, self.block.mixer).head_dim
        # The result [B, T, E] cannot overwrite out [B, tokens, heads, D] if backward needs out, or if their numbers of
        # elements differ.
        if self.keep.attention_output or x.shape[2] != width or tokens != self.context.tokens:
            out, lse = self.attend(x)
            return self.after_attention(x, out, None), out, lse
        with label("checkpoints"):  # y is the next block's x, which that block stores
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
        out_buffer = y.view(len(y), tokens, heads, -1)
        out, lse = self.attend(x, out_buffer)
        # Under autocast `attend` may return out in another dtype, and so in other memory: a third tensor.
        return self.after_attention(x, out, y), out, lse

    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, needs_dx: bool
    ) -> None:
        """Overwrites dx, which is dy on entry, by the gradient of x. See `BlockRun.differentiate`."""
        out, lse = output
        projections = self.block.projections(self.context, normed=False)
        needs_attention = needs_dx or any(p.requires_grad for p in projections.parameters())
        # 1. Backward of the token-wise part.
        with label("attention"):
            dout = torch.empty_like(out) if needs_attention else None
        self.differentiate_after_attention(x, out, dx, dout, totals, needs_dx)
        if dout is None:
            return
        # 2. Backward of attention and of the projections, one stage of heads after the other. Adds to dx.
        with label("attention"):
            if self.gathered_ranks == 1:
                source = self.source(x, dx if needs_dx else None, totals)
                self.upipe.differentiate(dout, source, out, lse, self.call)
            else:
                self.differentiate_gathered(x, out, lse, dout, dx, totals)

    def differentiate_gathered(
        self, x: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dx: Tensor, totals: GradientSums
    ) -> None:
        """Adds attention's gradient to dx under tensor parallelism: through the gather of tokens, and the norm."""
        # Attention's input is the gathered norm(x). Its gradient goes back through the reduce-scatter and the norm.
        gathered_dx = x.new_zeros((len(x), x.shape[1] * self.gathered_ranks, x.shape[2]))
        source = self.source(self.attention_input(x), gathered_dx[:, : self.context.tokens], totals)
        self.upipe.differentiate(dout, source, out, lse, self.call)
        norm_dx, chunking = torch.empty_like(dx), (self.chunk, self.gathered_ranks)
        chunked.backward(self.block.norm, (x,), gathered_dx, (norm_dx,), totals, RNGReplay(), *chunking)
        dx += norm_dx


class StateRun(BlockRun):
    """One run of a block whose mixer has a state: stores x, and recomputes the mixer in backward."""

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
        # 2. Backward of the token-wise part.
        dout = torch.empty_like(out) if out.requires_grad else None
        self.differentiate_after_attention(x, out.detach(), dx, dout, totals, needs_dx)
        if dout is None:
            return
        # 3. Backward of the norm and the mixer. Adds to dx.
        with label("attention"):
            sources = [*([leaf] if needs_dx else []), *totals.parameters]
            gradients: list[Tensor | None] = list(torch.autograd.grad(out, sources, dout, allow_unused=True))
            totals.add(gradients[len(sources) - len(totals.parameters) :])
        if needs_dx and (mixer_dx := gradients[0]) is not None:
            dx += mixer_dx
