"""Activation checkpointing policies, applied to a plain model from outside.

    policy              stored per block        recomputed in backward
    none                autograd's tensors      nothing
    layer               x                       everything
    attention_output    x, out, lse             everything except attention (DistFlashAttention, arXiv 2310.03294)

x [B, T, E] is the block's input; out [B, T, H, D] and lse [B, T, H] are attention's output.

`inputs` and `outputs` reduce the number of blocks that store x, or out and lse: see `segments`. If a block does not
store x, backward recomputes x by running the previous block again. When backward then reaches the previous block, its
attention does not run a third time: the recomputation has stored its output, in memory that later blocks have freed.

A layer with a state (`armillary.states`) stores only x under "layer" and "attention_output". Storing its
output would save nothing: its backward needs states and chunks, for which the layer is recomputed from x anyway.

Under the last two policies a block is one `autograd.Function`. The token-wise parts run in chunks of tokens, q, k and v
are computed in stages of heads if the method has stages (UPipe), and residuals and gradients are added in place. So
only two to four tensors of the size of x [B, T, E] are alive at once. Forward: x and out, which the result overwrites;
there is a third tensor for the result under "attention_output", or if out and x differ in size.
Backward: x, out, dout, and dy, which dx overwrites. In 16 bits, dx is rounded each time that a stage of heads adds to
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention import Method
from armillary.attention.parts import GradientSums, capture_autocast
from armillary.core import label
from armillary.core.parts import phase
from armillary.models.activation_checkpoint.checkpoint import Checkpoint
from armillary.models.activation_checkpoint.gradient_buffer import writable
from armillary.models.activation_checkpoint.runs import BlockRun, CheckpointedRun, StateRun
from armillary.models.activation_checkpoint.segments import Keep, tensors_by_block
from armillary.models.block import Block, Context, Decoder, attend, run_plainly
from armillary.models.layers import chunked
from armillary.models.layers.chunked import trained_parameters
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
            `armillary.core.token_chunks`.
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
