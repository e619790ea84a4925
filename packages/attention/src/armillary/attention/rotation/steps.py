"""The walk of travellers round circles of ranks as a schedule: what `Rotation.walk` and `Returns` do, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from armillary.attention.comm_plan import Move, Step, Steps, Work, move, steps
from armillary.attention.rotation.topology import Circle
from armillary.attention.tiling.grid import Grid
from armillary.core.network import Send

Returning = Callable[[Circle, Grid, int], Iterable[Send]]
"""The `sends` of a way home: what leaves all ranks of a circle after a step, in tokens."""


def walk(work: Work, circles: Sequence[Circle], hop: int, back: int = 0, returns: Returning | None = None) -> Steps:
    """R steps: travellers go on beside the step's computation, and what that gives is returned when it is there.

    Args:
        work: whose shards those of the circles are.
        circles: of R ranks each, as they stand; they turn the shorter way. Together all ranks of the axis.
        hop: bytes of a token that goes on.
        back: bytes of a token that returns.
    """
    grid = work.grid
    circles = [circle.shorter_way(grid) for circle in circles]

    def sends(step: int) -> Iterator[Move]:
        yield move("p2p", "ring", _bytes((circle.hops(grid, step) for circle in circles), hop))

    def returned(step: int) -> Iterator[Move]:
        if returns and step > 0:
            yield move("p2p", "ring", _bytes((returns(circle, grid, step) for circle in circles), back))

    turns = range(len(circles[0].ranks))
    return steps(*(Step(tuple(sends(step)), _pairs(work, circles, step), tuple(returned(step))) for step in turns))


def _bytes(sends: Iterable[Iterable[Send]], size: int) -> Iterator[Send]:
    return (Send(source, target, tokens * size) for some in sends for source, target, tokens in some if tokens)


def _pairs(work: Work, circles: Sequence[Circle], step: int) -> tuple[int, ...]:
    grid, heads = work.grid, len(work.key_heads)
    pairs = [0] * sum(len(circle.ranks) for circle in circles)
    for circle in circles:
        for place, rank in enumerate(circle.ranks):
            pairs[rank] = grid.pairs(*circle.cell(place, circle.origin(place, step)), work.batch) * heads
    return tuple(pairs)
