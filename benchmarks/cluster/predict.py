"""The planner's prediction for a contender, for comparison with its measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple, Self

from contenders import Contender, Shapes

from armillary.plan import Cluster
from armillary.plan.time.clocks import plan_seconds

FORWARD, BACKWARD = 2, 5
"""Matrix products of a block."""


class Kernels(NamedTuple):
    """Seconds of a block, forward and backward: per (query, key) pair of a head, and the constant part."""

    pair: float
    cell: float

    @classmethod
    def of(cls, shapes: Shapes, cells: Mapping[str, Sequence[float]]) -> Self:
        """Fits the times of blocks of the two `cell_sizes`, measured on all ranks at once."""
        small, large = (size**2 * shapes.heads for size in cell_sizes(shapes))
        quick, slow = (median(cells[str(size)]) for size in cell_sizes(shapes))
        pair = max(0.0, (slow - quick) / (large - small))
        return cls(pair, max(0.0, quick - pair * small))

    def of_all(self, shapes: Shapes, ranks: int) -> float:
        """Seconds of `ranks` blocks of T queries and T keys."""
        return ranks * (self.cell + self.pair * shapes.tokens**2 * shapes.heads)


def cell_sizes(shapes: Shapes) -> tuple[int, int]:
    """Queries and keys of the two blocks from whose times the time of a pair follows."""
    return shapes.tokens, 4 * shapes.tokens


def predicted(cluster: Cluster, contender: Contender, shapes: Shapes, kernels: Kernels) -> float:
    """The planner's seconds of forward and backward."""
    plan, products = contender.comm_plan(shapes), FORWARD + BACKWARD
    machine = replace(cluster, accelerator=replace(cluster.accelerator, step=kernels.cell / 2))
    passes = ((plan.forward, FORWARD), (plan.backward, BACKWARD))
    return sum(plan_seconds(steps, machine, kernels.pair * n / products).seconds for steps, n in passes)
