"""Activation checkpointing policies, applied to a plain model from outside.

    policy              stored per block        recomputed in backward
    none                autograd's tensors      nothing
    layer               x                       everything
    attention_output    x, out, lse             everything except attention (DistFlashAttention, arXiv 2310.03294)

x [B, T, E] is the block's input; out [B, T, H, D] and lse [B, T, H] are attention's output.

`inputs` and `outputs` reduce the number of blocks that store x, or out and lse: see `segments`. If a block does not
store x, backward recomputes x by running the previous block again. When backward then reaches the previous block, its
attention does not run a third time: the recomputation has stored its output, in memory that later blocks have freed.

A layer with a state (`armillary.attention.states`) stores only x under "layer" and "attention_output". Storing its
output would save nothing: its backward needs states and chunks, for which the layer is recomputed from x anyway.

Under the last two policies a block is one `autograd.Function`. The token-wise parts run in chunks of tokens, q, k and v
are computed in stages of heads if the method has stages (UPipe), and residuals and gradients are added in place. So
only two to four tensors of the size of x [B, T, E] are alive at once. Forward: x and out, which the result overwrites;
there is a third tensor for the result under "attention_output", or if out and x differ in size.
Backward: x, out, dout, and dy, which dx overwrites. In 16 bits, dx is rounded each time that a stage of heads adds to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention import AttentionSpec, Method, Projected, UPipe
from armillary.attention.parts import GradientSums, RNGReplay, capture_autocast
from armillary.core import label
from armillary.core.parts import phase
from armillary.models.activation_checkpoint.block_run import BlockRun
from armillary.models.activation_checkpoint.checkpoint import Checkpoint
from armillary.models.activation_checkpoint.gradient_buffer import writable
from armillary.models.activation_checkpoint.segments import Keep, tensors_by_block
from armillary.models.activation_checkpoint.state_run import StateRun
from armillary.models.block import Block, Context, Decoder, attend, run_plainly
from armillary.models.layers import chunked
from armillary.models.layers.chunked import trained_parameters
from armillary.models.layers.projections import ProjectionModule
from armillary.models.layers.state_mixers import StateMixer

Policy = Literal["none", "layer", "attention_output"]
POLICIES: tuple[Policy, ...] = ("none", "layer", "attention_output")


@dataclass(frozen=True)
class Checkpointing:
    """Options of activation checkpointing.

    Args:
        policy: selects the tensors that each block stores for backward.
        offload: True stores these tensors in the host's memory.
        prefetch: True copies a block's offloaded tensors back while the block after it runs backward. False starts the
            copies when that backward ends: the peak is lower by these tensors, but the copies overlap with less
            computation.
        tiled: True runs the token-wise part in chunks that backward recomputes, even under policy "none".
        chunk: number of tokens in a chunk of norms, projections and MLPs; by default chosen by
            `armillary.attention.call.token_chunks`.
        inputs: number of blocks that store their input, by default all. The other blocks recompute their input from the
            previous block. The module `segments` chooses the blocks that store theirs.
        outputs: under "attention_output", only this number of last blocks store attention's output, by default all.
        on_device: with `offload`, the tensors of this number of last blocks stay on the device.

    Raises:
        ValueError: the policy is unknown, an option has no meaning under the policy or without `offload`, or a number
            is below its minimum.
    """

    policy: Policy = "none"
    offload: bool = False
    prefetch: bool = True
    tiled: bool = False
    chunk: int | None = None
    inputs: int | None = None
    outputs: int | None = None
    on_device: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"checkpoint policy {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.offload and self.policy == "none":
            raise ValueError(
                "offload=True keeps checkpoints in the host's memory, but policy 'none' has no checkpoints"
            )
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunks of {self.chunk} tokens: at least 1 is needed")
        if self.inputs is not None and self.policy == "none":
            raise ValueError(f"inputs {self.inputs}: policy 'none' recomputes no block's input")
        if self.outputs is not None and self.policy != "attention_output":
            raise ValueError(
                f"outputs {self.outputs}: only policy 'attention_output' keeps attention's, not {self.policy!r}"
            )
        if self.on_device and not self.offload:
            raise ValueError(f"on_device {self.on_device}: without offload, all checkpoints are on the device")
        for name, count, minimum in (
            ("inputs", self.inputs, 1),
            ("outputs", self.outputs, 0),
            ("on_device", self.on_device, 0),
        ):
            if count is not None and count < minimum:
                raise ValueError(f"{name} {count}: at least {minimum} is needed")

    def tensors_by_block(self, layers: int) -> tuple[Keep, ...]:
        """Returns which tensors each of `layers` blocks stores, in order, under a policy other than "none".

        Raises:
            ValueError: a count is above the number of blocks, or `inputs` is too small for `on_device`.
        """
        inputs = layers if self.inputs is None else self.inputs
        all_outputs = layers if self.policy == "attention_output" else 0
        outputs = all_outputs if self.outputs is None else self.outputs
        for name, count in (("inputs", inputs), ("outputs", outputs), ("on_device", self.on_device)):
            if count > layers:
                raise ValueError(f"{name} {count}: the model has {layers} blocks")
        if self.on_device >= inputs < layers:
            raise ValueError(
                f"inputs {inputs} must be above on_device {self.on_device}: the last {self.on_device} blocks and the "
                "first one keep their input"
            )
        return tensors_by_block(layers, inputs, outputs, layers - self.on_device if self.offload else 0)

    def apply(self, model: nn.Module) -> None:
        """Makes the blocks of a `Llama` or `GPT` run under this policy, in place. A later call replaces the policy.

        Call it before or after FSDP, but before `parallelize` compiles blocks, which may replace the same attribute,
        `Block.run`.

        Raises:
            ValueError: the model has no `Block`s to which the policy applies; errors of `tensors_by_block`; or the
                policy is not "none" and attention is not a `Method`.
        """
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        if not blocks and (self.policy != "none" or self.tiled):
            raise ValueError(f"{type(model).__name__} has no blocks of armillary.models, which a policy applies to")
        for block in blocks:
            if self.policy != "none" and not isinstance(block.attention, Method):
                kind = type(block.attention).__name__
                raise ValueError(f"policy {self.policy!r} needs an armillary method for attention; {kind} is not one")
        runs = [partial(run_tiled, self.chunk) if self.tiled else run_plainly] * len(blocks)
        if self.policy != "none":
            runs = [
                partial(run_checkpointed, self.chunk, self.prefetch, keep)
                for keep in self.tensors_by_block(len(blocks))
            ]
        for block, run in zip(blocks, runs, strict=True):
            block.run = run
        for module in model.modules():
            if isinstance(module, Decoder):
                module.norm_in_chunks = self.tiled or self.policy != "none"
                module.chunk = self.chunk


def run_tiled(chunk: int | None, block: Block, x: Tensor, context: Context) -> Tensor:
    """Runs a block under autograd. The token-wise part saves only its inputs x and out; backward recomputes it."""
    out = attend(block, x, context)
    with label("mlp"):
        return chunked.in_chunks(block.after_attention, (x, out), block, chunk, block.gathered_ranks)


def run_checkpointed(
    chunk: int | None, prefetch: bool, keep: Keep, block: Block, x: Tensor, context: Context
) -> Tensor:
    """Runs a block as one `autograd.Function` under a checkpoint policy. `Checkpointing.apply` binds the options."""
    params = trained_parameters(block)
    previous: Checkpoint | None = context.previous_checkpoint[0]() if context.previous_checkpoint else None
    if previous is None or not previous.is_result(x):
        keep = replace(keep, x=True)  # x must be stored: it is not the previous block's result, or was changed
    context.previous_checkpoint.clear()
    if not torch.is_grad_enabled() or not (x.requires_grad or params):
        keep = replace(keep, host=False)  # without a backward, nothing needs to be copied to the host
    if isinstance(block.mixer, StateMixer):
        block_run = StateRun(block, context, replace(keep, attention_output=False), chunk, prefetch)
    else:
        block_run = CheckpointedRun.of(x, block, context, keep, chunk, prefetch)
    return cast(Tensor, cast(Any, CheckpointedBlock).apply(block_run, previous, x, *params))


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
        # 1. Backward of the token-wise part. Chunk by chunk it reads dy from `dx`, and overwrites dy by the gradient of
        # x through the residual and the MLP. Also writes dout.
        with label("attention"):
            dout = torch.empty_like(out) if needs_attention else None
        with label("mlp"):
            grads = (dx if needs_dx else None, dout)
            chunking = self.chunk, self.gathered_ranks
            chunked.backward(self.block.after_attention, (x, out), dx, grads, totals, self.draws, *chunking)
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


class CheckpointedBlock(torch.autograd.Function):
    """A block as one autograd function. Stores those of x, out and lse that `Keep` selects; recomputes the others."""

    @staticmethod
    def forward(ctx: Any, block_run: BlockRun, previous: Checkpoint | None, x: Tensor, *params: Tensor) -> Tensor:
        checkpoint = Checkpoint(block_run, capture_autocast(x.device.type), previous)
        with checkpoint.autocast():
            y, *attention_output = block_run.forward(x)
        checkpoint.store(ctx, params, x, attention_output)
        checkpoint.record_result(y)
        ctx.checkpoint = checkpoint
        block_run.context.previous_checkpoint[:] = [ref(checkpoint)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with label("gradients"):
            dx = writable(grad_outputs)  # this is dy; `differentiate` overwrites it by the gradient of x
        checkpoint: Checkpoint = ctx.checkpoint
        block_run = checkpoint.block_run.replay()
        totals = GradientSums(trained_parameters(block_run.block))
        with phase("backward"), checkpoint.autocast():
            x, output = checkpoint.recall()
            if block_run.prefetch:  # the previous block's copies to the device overlap with this block's backward
                checkpoint.fetch_previous()
            block_run.differentiate(x, output, dx, totals, ctx.needs_input_grad[2])
        checkpoint.finish()
        return None, None, dx if ctx.needs_input_grad[2] else None, *totals.result()
