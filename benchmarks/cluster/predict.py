"""What a planner says that a contender takes, to be held against what it took."""

from __future__ import annotations

from contenders import Contender, Shapes

from armillary.core import Cluster


def predicted(cluster: Cluster, contender: Contender, shapes: Shapes, cell: float) -> float | None:
    """Seconds of a forward and backward; None: nobody has said.

    Args:
        cell: seconds of the forward and backward of T queries by T keys, all ranks at once, as measured.
    """
    return None  # until schedules say which sends are under way together
