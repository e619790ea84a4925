"""Activation checkpointing policies, applied to a plain model from outside.

    policy              stored per block        recomputed in backward
    none                autograd's tensors      nothing
    layer               x                       everything
    attention_output    x, out, lse             everything except attention (DistFlashAttention, arXiv 2310.03294)

x [B, T, E] is the block's input; out [B, T, H, D] and lse [B, T, H] are attention's output.

A layer with a state (`armillary.states`) stores only x under "layer" and "attention_output". Storing its output would
save nothing: its backward needs states and chunks, for which the layer is recomputed from x anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from torch import nn

from armillary.attention import Method
from armillary.models.activation_checkpoint.checkpointed_block import Keep, run_checkpointed, run_tiled
from armillary.models.block import Block, Decoder, run_plainly

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
            previous block (`segment_sizes`).
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


# -- segments: which blocks store their tensors -----------------------------------------------------------------------

# A block that does not store its input recomputes it from the previous block. So blocks form segments, in which only
# the first block stores its input in forward. A segment is recomputed when backward reaches its last block; its blocks
# then keep the recomputed tensors until their own backward. By then the later segments have released their tensors. So
# earlier segments may be longer than later ones, at the same peak.


@lru_cache(maxsize=4096)  # the planner's search repeats few distinct counts
def segment_sizes(layers: int, inputs: int, outputs: int) -> tuple[int, ...]:
    """Returns the number of blocks of each segment, in order, for the lowest peak number of stored tensors.

    Forward stores `inputs` inputs, one per segment, and the attention outputs of the last `outputs` blocks.
    """
    # Everything stored in forward is alive when backward begins, so no peak is lower. The smallest peak for which
    # segments as long as possible cover all layers is the answer.
    limit = inputs + outputs
    while (sizes := _longest_segments(layers, inputs, outputs, limit)) is None:
        limit += 1
    return sizes


@lru_cache(maxsize=1024)
def best_input_count(layers: int, outputs: int) -> int:
    """Returns the number of inputs to store for the lowest peak; if several numbers have this peak, the largest."""
    return min(range(layers, 0, -1), key=lambda inputs: peak_count(layers, inputs, outputs))


def peak_count(layers: int, inputs: int, outputs: int) -> int:
    """Returns the largest number of inputs and attention outputs alive at once, after forward or in recomputations."""
    # `count` is the number of tensors stored in forward that are still alive.
    end, count, peak = layers, inputs + outputs, inputs + outputs
    for size in reversed(segment_sizes(layers, inputs, outputs)):  # in backward's order
        start = end - size
        peak = max(peak, count + sum(recomputed_counts(start, end, layers - outputs)))
        # After the segment's backward, its input and the outputs that its blocks stored in forward are released.
        count -= 1 + min(size, max(0, end - (layers - outputs)))
        end = start
    return peak


def _longest_segments(layers: int, inputs: int, outputs: int, limit: int) -> tuple[int, ...] | None:
    """Returns segment sizes, each as large as a peak of `limit` tensors allows; None if they don't cover all layers."""
    sizes, end = list[int](), layers  # from the last segment on
    for segments in range(inputs, 0, -1):  # the number of segments up to block `end`, this one included
        size, longest = 1, end - (segments - 1)  # each earlier segment has at least one block
        # Alive while this segment is recomputed: the inputs of `segments` segments, and the outputs that blocks before
        # `end` stored in forward.
        count = segments + max(0, outputs - (layers - end))
        while size < longest and count + sum(recomputed_counts(end - size - 1, end, layers - outputs)) <= limit:
            size += 1
        sizes, end = [size, *sizes], end - size
    return tuple(sizes) if end == 0 else None


def recomputed_counts(start: int, end: int, without: int) -> tuple[int, int]:
    """Returns the numbers of inputs and attention outputs that recomputing the blocks start to end - 1 adds.

    The first `without` blocks of the model stored no attention output in forward.
    """
    # The segment's first block stored its input. Its last block's input and output are used at once: they don't count.
    inputs = max(0, end - start - 2)
    outputs = max(0, min(end - 1, without) - start)
    return inputs, outputs


def tensors_by_block(layers: int, inputs: int, outputs: int, host: int) -> tuple[Keep, ...]:
    """Returns which tensors each block stores, in order: `inputs` blocks their input, the last `outputs` attention's.

    The first `host` blocks store their tensors in the host's memory.
    """
    # If any block offloads, each of the later ones stores its input, on the device.
    on_device = layers - host if host else 0
    sizes = ()
    if layers > on_device:  # segments of the first blocks
        sizes = segment_sizes(layers - on_device, inputs - on_device, max(0, outputs - on_device))
    first_blocks = {sum(sizes[:i]) for i in range(len(sizes))}  # of segments
    return tuple(
        Keep(x=i in first_blocks or i >= layers - on_device, attention_output=i >= layers - outputs, host=i < host)
        for i in range(layers)
    )
