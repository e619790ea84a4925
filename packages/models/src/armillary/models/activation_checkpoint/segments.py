"""Chooses which tensors each block stores for its backward, and whether on the host, from three numbers of blocks.

A block that does not store its input recomputes it from the previous block. So blocks form segments, in which only the
first block stores its input in forward. A segment is recomputed when backward reaches its last block; the segment's
blocks then keep the recomputed tensors until their own backward. By then the later segments have released their
tensors. So earlier segments may be longer than later ones, at the same peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Keep:
    """Selects the tensors that a block stores from forward to backward.

    Args:
        x: True stores the block's input [B, T, E].
        attention_output: True stores out [B, T, H, D] and lse [B, T, H].
        host: True stores these tensors in the host's memory.
    """

    x: bool
    attention_output: bool
    host: bool


@lru_cache(maxsize=4096)  # the planner's search repeats few distinct counts
def segment_sizes(layers: int, inputs: int, outputs: int) -> tuple[int, ...]:
    """Returns the number of blocks of each segment, in order, for the lowest peak number of stored tensors.

    Args:
        layers: number of blocks.
        inputs: number of inputs stored in forward, one per segment.
        outputs: number of last blocks that store attention's output in forward.
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
    """Returns segment sizes, each as large as a peak of `limit` tensors allows, starting from the last segment.

    None if `inputs` such segments do not cover all layers.
    """
    sizes, end = list[int](), layers
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

    The segment's first block has stored its input in forward. Its last block's input and output are used at once, and
    do not count.

    Args:
        without: number of first blocks that store no attention output in forward.
    """
    inputs = max(0, end - start - 2)
    outputs = max(0, min(end - 1, without) - start)
    return inputs, outputs


def tensors_by_block(layers: int, inputs: int, outputs: int, host: int) -> tuple[Keep, ...]:
    """Returns which tensors each block stores, in order.

    Args:
        layers: number of blocks.
        inputs: number of blocks that store their input.
        outputs: number of last blocks that store attention's output.
        host: number of first blocks that store their tensors in the host's memory. If it is not 0, each of the later
            blocks stores its input, on the device.
    """
    on_device = layers - host if host else 0
    sizes = ()
    if layers > on_device:  # segments of the first blocks
        sizes = segment_sizes(layers - on_device, inputs - on_device, max(0, outputs - on_device))
    first_blocks = {sum(sizes[:i]) for i in range(len(sizes))}  # of segments
    return tuple(
        Keep(x=i in first_blocks or i >= layers - on_device, attention_output=i >= layers - outputs, host=i < host)
        for i in range(layers)
    )
