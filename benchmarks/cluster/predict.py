"""What a planner says that a contender takes, to be held against what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple, Self

from contenders import Contender, Shapes

from armillary.plan import Cluster
from armillary.plan.comm_time.comm_plan_time import plan_seconds

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
    """Seconds of a forward and backward, as the planner has them."""
    plan, products = contender.comm_plan(shapes), FORWARD + BACKWARD
    machine = replace(cluster, accelerator=replace(cluster.accelerator, step=kernels.cell / 2))
    passes = ((plan.forward, FORWARD), (plan.backward, BACKWARD))
    return sum(plan_seconds(steps, machine, kernels.pair * n / products).seconds for steps, n in passes)
