"""The loop of a ring as a communication plan: what `Rotation.rotate` and `Returns` send and compute, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from armillary.attention.comm_plan import AttentionShape, Move, Step, Steps, move, steps
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.grid import Grid
from armillary.core.network import Send

Returning = Callable[[RingTopology, Grid, int], Iterable[Send]]
"""The `sends` of a way to return: what leaves all ranks of a ring after a step, in tokens."""


def rotation_steps(
    work: AttentionShape, rings: Sequence[RingTopology], hop: int, back: int = 0, returns: Returning | None = None
) -> Steps:
    """R steps: shards go on beside the step's computation, and what that gives is returned when it is there.

    Args:
        work: whose shards those of the rings are.
        rings: of R ranks each, as they stand; they turn the shorter way. Together all ranks of the axis.
        hop: bytes of a token that goes on.
        back: bytes of a token that returns.
    """
    grid = work.grid
    rings = [ring.shorter_way(grid) for ring in rings]

    def sends(step: int) -> Iterator[Move]:
        yield move("p2p", "ring", _bytes((ring.hops(grid, step) for ring in rings), hop))

    def returned(step: int) -> Iterator[Move]:
        if returns and step > 0:
            yield move("p2p", "ring", _bytes((returns(ring, grid, step) for ring in rings), back))

    turns = range(len(rings[0].ranks))
    return steps(*(Step(tuple(sends(step)), _pairs(work, rings, step), tuple(returned(step))) for step in turns))


def _bytes(sends: Iterable[Iterable[Send]], size: int) -> Iterator[Send]:
    return (Send(source, target, tokens * size) for some in sends for source, target, tokens in some if tokens)


def _pairs(work: AttentionShape, rings: Sequence[RingTopology], step: int) -> tuple[int, ...]:
    grid, heads = work.grid, len(work.key_heads)
    pairs = [0] * sum(len(ring.ranks) for ring in rings)
    for ring in rings:
        for place, rank in enumerate(ring.ranks):
            pairs[rank] = grid.pairs(*ring.query_key_shards(place, ring.origin(place, step)), work.batch) * heads
    return tuple(pairs)
