"""What the registry knows of a method: each method's file ends with its entry, `REGISTERED`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import AttentionShape, CommPlan
from armillary.attention.methods.base import Method
from armillary.attention.methods.teams import Placement

Backward = Literal["auto", "keys", "queries"]
InnerPlan = Callable[[AttentionShape], CommPlan]
"""The plan of a method on the sequence axis."""


class MethodOptions(NamedTuple):
    """What a method may be told besides its axes."""

    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    backward: Backward = "auto"


@dataclass(frozen=True)
class OnSequence:
    """A method on the sequence axis.

    Args:
        build: the method on an axis.
        comm_plan: what it sends and computes.
        takes: the options that it has.
    """

    build: Callable[[DeviceMesh, MethodOptions], Method]
    comm_plan: Callable[[AttentionShape, MethodOptions], CommPlan]
    takes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnHeads:
    """A method on the head axis, around another.

    Args:
        build: the method on an axis, around another.
        comm_plan: what both send and compute on so many ranks of the head axis.
        takes: the options that it has.
    """

    build: Callable[[DeviceMesh, Method, MethodOptions], Method]
    comm_plan: Callable[[AttentionShape, int, InnerPlan, MethodOptions], CommPlan]
    takes: tuple[str, ...] = ()
