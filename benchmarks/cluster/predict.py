"""What a planner says that a contender takes, to be held against what it took."""

from __future__ import annotations

from contenders import Contender, Shapes

from armillary.attention.schedule import Step, Steps
from armillary.core import Cluster

BACKWARD = 2.5
"""Matrix products of backward, to those of forward."""


def predicted(cluster: Cluster, contender: Contender, shapes: Shapes, cell: float) -> float:
    """Seconds of a forward and backward: at each step what is sent, or what is computed meanwhile if that takes longer.

    Args:
        cell: seconds of the forward and backward of T queries by T keys, all ranks at once, as measured.
    """
    schedule = contender.schedule(shapes)
    pair = cell / (shapes.tokens**2 * shapes.heads) / (1 + BACKWARD)
    return seconds(cluster, schedule.forward, pair) + seconds(cluster, schedule.backward, BACKWARD * pair)


def seconds(cluster: Cluster, steps: Steps, pair: float) -> float:
    """Of steps that follow each other; `pair` seconds for each query and key."""
    return sum(max(exchange(cluster, step), max(step.pairs, default=0) * pair) for step in steps)


def exchange(cluster: Cluster, step: Step) -> float:
    return cluster.transit(send for move in step.moves for send in move.sends).seconds
