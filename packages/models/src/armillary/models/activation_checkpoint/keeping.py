"""Which block keeps what for its backward, and where: a pure function of counts.

A block that keeps no input has it computed again from the block below. Blocks are so cut into segments, of which the
first block alone keeps its input; a segment is run again when backward comes to its last block, and what its blocks
need then is kept until they are differentiated. Meanwhile blocks above have given back what they kept: so lower
segments may be longer without more being kept at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Keep:
    """What a block keeps from forward to backward.

    Args:
        x: its input [B, T, E].
        attended: what attention gave: out [B, T, H, D] and lse [B, T, H].
        host: in the host's memory.
    """

    x: bool
    attended: bool
    host: bool


@lru_cache(maxsize=4096)  # a planner asks for the same ones again and again
def segments(layers: int, inputs: int, attended: int) -> tuple[int, ...]:
    """Blocks of each segment, the first segment first, so that as little as possible is held when most is.

    Args:
        inputs: number of segments.
        attended: the last so many blocks keep what attention gave.
    """
    limit = inputs + attended
    while (found := _cut(layers, inputs, attended, limit)) is None:
        limit += 1
    return found


@lru_cache(maxsize=1024)
def fewest(layers: int, attended: int) -> int:
    """The number of inputs to keep with which least is held when most is; of several such, the most."""
    return min(range(layers, 0, -1), key=lambda inputs: most_held(layers, inputs, attended))


def most_held(layers: int, inputs: int, attended: int) -> int:
    """Inputs and results of attention that are held when most are: after forward, or when a segment is run again."""
    end, held, most = layers, inputs + attended, inputs + attended
    for size in reversed(segments(layers, inputs, attended)):
        start = end - size
        most = max(most, held + sum(made_again(start, end, layers - attended)))
        held -= 1 + min(size, max(0, end - (layers - attended)))
        end = start
    return most


def _cut(layers: int, inputs: int, attended: int, limit: int) -> tuple[int, ...] | None:
    """From the last block on, segments as long as may be, holding no more than `limit`; an input is 1, as is an out."""
    sizes, end = list[int](), layers
    for left in range(inputs, 0, -1):
        size, most = 1, end - (left - 1)
        kept = left + max(0, attended - (layers - end))
        while size < most and kept + sum(made_again(end - size - 1, end, layers - attended)) <= limit:
            size += 1
        sizes, end = [size, *sizes], end - size
    return tuple(sizes) if end == 0 else None


def made_again(start: int, end: int, without: int) -> tuple[int, int]:
    """Inputs and results of attention that a segment of blocks start..end-1 holds besides what blocks keep.

    Its last block's are not counted: they are used at once.

    Args:
        without: the first so many blocks keep no result of attention.
    """
    return max(0, end - start - 2), max(0, min(end - 1, without) - start)


def keeps(layers: int, inputs: int, attended: int, host: int) -> tuple[Keep, ...]:
    """What each block keeps, the first block first.

    Args:
        inputs: blocks that keep their input.
        attended: the last so many blocks keep what attention gave.
        host: the first so many keep it in the host's memory. Those above keep their input.
    """
    above = layers - host if host else 0
    sizes = segments(layers - above, inputs - above, max(0, attended - above)) if layers > above else ()
    firsts = {sum(sizes[:i]) for i in range(len(sizes))}
    return tuple(
        Keep(x=i in firsts or i >= layers - above, attended=i >= layers - attended, host=i < host)
        for i in range(layers)
    )
