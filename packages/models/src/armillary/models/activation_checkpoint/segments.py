"""Chooses the tensors that each block keeps for its backward, and their place, from three numbers of blocks.

A block without its input recomputes it from the block below. So blocks form segments, in which only the first block
keeps its input. A segment is recomputed when backward reaches its last block; its blocks then keep the recomputed
tensors until their own backward. By then the blocks above have released theirs, so lower segments may be longer at the
same peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Keep:
    """The tensors that a block keeps from forward to backward.

    Args:
        x: its input [B, T, E].
        attention_output: out [B, T, H, D] and lse [B, T, H].
        host: keeps them in the host's memory.
    """

    x: bool
    attention_output: bool
    host: bool


@lru_cache(maxsize=4096)  # the planner's search repeats few distinct counts
def segment_sizes(layers: int, inputs: int, outputs: int) -> tuple[int, ...]:
    """Returns the number of blocks of each segment, in order, with the lowest peak of kept tensors.

    Args:
        inputs: number of segments.
        outputs: number of last blocks that keep attention's output.
    """
    limit = inputs + outputs  # everything kept in forward is alive when backward begins: no peak is lower
    while (sizes := _longest_segments(layers, inputs, outputs, limit)) is None:
        limit += 1
    return sizes


@lru_cache(maxsize=1024)
def best_input_count(layers: int, outputs: int) -> int:
    """Returns the number of inputs to keep with the lowest peak; of several such numbers, the largest."""
    return min(range(layers, 0, -1), key=lambda inputs: peak_count(layers, inputs, outputs))


def peak_count(layers: int, inputs: int, outputs: int) -> int:
    """Returns the peak number of inputs and attention outputs: after forward, or while a segment is recomputed."""
    end, count, peak = layers, inputs + outputs, inputs + outputs
    for size in reversed(segment_sizes(layers, inputs, outputs)):  # in backward's order
        start = end - size
        peak = max(peak, count + sum(recomputed_counts(start, end, layers - outputs)))
        # After the segment's backward, its input and the outputs that it kept from forward are released.
        count -= 1 + min(size, max(0, end - (layers - outputs)))
        end = start
    return peak


def _longest_segments(layers: int, inputs: int, outputs: int, limit: int) -> tuple[int, ...] | None:
    """Returns segments, each as long as a peak of `limit` allows, from the last block backwards.

    None if `inputs` such segments do not cover all layers.
    """
    sizes, end = list[int](), layers
    for segments in range(inputs, 0, -1):
        size, longest = 1, end - (segments - 1)  # each segment below has at least one block
        # Kept from forward while this segment is recomputed: inputs of the segments, outputs of the blocks below `end`.
        count = segments + max(0, outputs - (layers - end))
        while size < longest and count + sum(recomputed_counts(end - size - 1, end, layers - outputs)) <= limit:
            size += 1
        sizes, end = [size, *sizes], end - size
    return tuple(sizes) if end == 0 else None


def recomputed_counts(start: int, end: int, without: int) -> tuple[int, int]:
    """Returns the numbers of inputs and attention outputs that recomputation adds in the segment start..end-1.

    Its first block's input is kept from forward; its last block's input and output are used at once and not counted.

    Args:
        without: number of first blocks that keep no attention output from forward.
    """
    return max(0, end - start - 2), max(0, min(end - 1, without) - start)


def tensors_by_block(layers: int, inputs: int, outputs: int, host: int) -> tuple[Keep, ...]:
    """Returns the tensors that each block keeps, in order.

    Args:
        inputs: number of blocks that keep their input.
        outputs: number of last blocks that keep attention's output.
        host: number of first blocks that keep their tensors in the host's memory. Blocks above keep their input.
    """
    on_device = layers - host if host else 0
    sizes = ()
    if layers > on_device:
        sizes = segment_sizes(layers - on_device, inputs - on_device, max(0, outputs - on_device))
    first_blocks = {sum(sizes[:i]) for i in range(len(sizes))}
    return tuple(
        Keep(x=i in first_blocks or i >= layers - on_device, attention_output=i >= layers - outputs, host=i < host)
        for i in range(layers)
    )
