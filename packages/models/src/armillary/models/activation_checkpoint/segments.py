"""The tensors that each block keeps for its backward, and where, as a pure function of counts.

A block without its input recomputes it from the block below. So blocks form segments, of which only the first block
keeps its input. A segment is run again when backward reaches its last block, and its blocks then keep what they need
until they are differentiated. By then the blocks above have released their tensors, so lower segments may be longer at
the same peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Keep:
    """The tensors that a block keeps from forward to backward.

    Args:
        x: its input [B, T, E].
        attended: attention's output: out [B, T, H, D] and lse [B, T, H].
        host: in the host's memory.
    """

    x: bool
    attended: bool
    host: bool


@lru_cache(maxsize=4096)  # a planner asks for the same ones again and again
def segment_sizes(layers: int, inputs: int, attended: int) -> tuple[int, ...]:
    """Returns the number of blocks of each segment, in order, with the lowest peak of kept tensors.

    Args:
        inputs: number of segments.
        attended: number of last blocks that keep attention's output.
    """
    limit = inputs + attended
    while (sizes := _longest_segments(layers, inputs, attended, limit)) is None:
        limit += 1
    return sizes


@lru_cache(maxsize=1024)
def best_input_count(layers: int, attended: int) -> int:
    """Returns the number of inputs to keep with the lowest peak; of several such numbers, the largest."""
    return min(range(layers, 0, -1), key=lambda inputs: peak_count(layers, inputs, attended))


def peak_count(layers: int, inputs: int, attended: int) -> int:
    """Returns the peak number of inputs and attention outputs: after forward, or when a segment is run again."""
    end, count, peak = layers, inputs + attended, inputs + attended
    for size in reversed(segment_sizes(layers, inputs, attended)):
        start = end - size
        peak = max(peak, count + sum(recomputed_counts(start, end, layers - attended)))
        count -= 1 + min(size, max(0, end - (layers - attended)))
        end = start
    return peak


def _longest_segments(layers: int, inputs: int, attended: int, limit: int) -> tuple[int, ...] | None:
    """Returns segments, each as long as a peak of `limit` allows, from the last block on; None if too few fit."""
    sizes, end = list[int](), layers
    for segments in range(inputs, 0, -1):
        size, longest = 1, end - (segments - 1)
        count = segments + max(0, attended - (layers - end))
        while size < longest and count + sum(recomputed_counts(end - size - 1, end, layers - attended)) <= limit:
            size += 1
        sizes, end = [size, *sizes], end - size
    return tuple(sizes) if end == 0 else None


def recomputed_counts(start: int, end: int, without: int) -> tuple[int, int]:
    """Returns how many inputs and attention outputs the segment of blocks start..end-1 keeps while it is run again.

    The last block's are used at once and not counted.

    Args:
        without: number of first blocks that keep no attention output from forward.
    """
    return max(0, end - start - 2), max(0, min(end - 1, without) - start)


def kept_by_blocks(layers: int, inputs: int, attended: int, host: int) -> tuple[Keep, ...]:
    """Returns the tensors that each block keeps, in order.

    Args:
        inputs: number of blocks that keep their input.
        attended: number of last blocks that keep attention's output.
        host: number of first blocks that keep theirs in the host's memory. Those above keep their input.
    """
    on_device = layers - host if host else 0
    sizes = ()
    if layers > on_device:
        sizes = segment_sizes(layers - on_device, inputs - on_device, max(0, attended - on_device))
    firsts = {sum(sizes[:i]) for i in range(len(sizes))}
    return tuple(
        Keep(x=i in firsts or i >= layers - on_device, attended=i >= layers - attended, host=i < host)
        for i in range(layers)
    )
