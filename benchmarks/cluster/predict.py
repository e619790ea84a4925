"""What a planner says that a contender takes, to be held against what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple, Self

from contenders import Contender, Shapes

from armillary.attention.schedule import Step, Steps
from armillary.core import Cluster

FORWARD, BACKWARD = 2, 5
"""Matrix products of a cell."""


class Kernels(NamedTuple):
    """Seconds that a cell takes, forward and backward: for each query and key of each head, and beside that."""

    pair: float
    cell: float

    @classmethod
    def of(cls, shapes: Shapes, cells: Mapping[str, Sequence[float]]) -> Self:
        """From the times of two cells, all ranks at once, by their `cell_sizes`."""
        small, large = (size**2 * shapes.heads for size in cell_sizes(shapes))
        quick, slow = (median(cells[str(size)]) for size in cell_sizes(shapes))
        pair = max(0.0, (slow - quick) / (large - small))
        return cls(pair, max(0.0, quick - pair * small))

    def of_all(self, shapes: Shapes, ranks: int) -> float:
        """Seconds of as many cells of T queries and keys."""
        return ranks * (self.cell + self.pair * shapes.tokens**2 * shapes.heads)


def cell_sizes(shapes: Shapes) -> tuple[int, int]:
    """Queries, and as many keys, of cells whose times tell what a pair takes."""
    return shapes.tokens, 4 * shapes.tokens


def predicted(cluster: Cluster, contender: Contender, shapes: Shapes, kernels: Kernels) -> float:
    """Seconds of a forward and backward: at each step those of what is sent, or of what is computed meanwhile."""
    schedule, products = contender.schedule(shapes), FORWARD + BACKWARD
    forward, backward = (Kernels(n / products * kernels.pair, kernels.cell / 2) for n in (FORWARD, BACKWARD))
    return seconds(cluster, schedule.forward, forward) + seconds(cluster, schedule.backward, backward)


def seconds(cluster: Cluster, steps: Steps, kernels: Kernels) -> float:
    """Of steps that follow each other; each waits for the slowest rank."""
    return sum(max(exchange(cluster, step), compute(step, kernels)) for step in steps)


def exchange(cluster: Cluster, step: Step) -> float:
    return cluster.transit(send for move in step.moves for send in move.sends).seconds


def compute(step: Step, kernels: Kernels) -> float:
    return kernels.cell + max(step.pairs) * kernels.pair if step.pairs else 0.0
