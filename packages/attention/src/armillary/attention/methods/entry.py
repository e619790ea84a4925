"""What the registry knows of a method: each method's file ends with its entry, `REGISTERED`.

An entry says how the method is built, what it sends and computes, what it allocates, and which options it has. All that
asks for methods by name goes through it: `build_attention`, the conformance suite, and the planner and the tuner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import AttentionShape, CommPlan
from armillary.attention.memory import HeadStages, Sizes
from armillary.attention.methods.base import Method
from armillary.attention.methods.teams import Placement
from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.core import SequenceLayout

Backward = Literal["auto", "keys", "queries"]
InnerPlan = Callable[[AttentionShape], CommPlan]
"""The plan of a method on the sequence axis."""


class MethodOptions(NamedTuple):
    """What a method may be given besides its axes."""

    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    backward: Backward = "auto"


UNLESS_GIVEN = MethodOptions()


class RingWalk(NamedTuple):
    """Which rank computes which block at which step of forward.

    Args:
        layout, key_layout: of the queries and keys whose shards the rings name.
        rings: as they stand; they turn the shorter way. Together all ranks of the axis.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    rings: Sequence[RingTopology]

    @classmethod
    def of_ring(cls, layout: SequenceLayout, moving: Moving) -> RingWalk:
        """One ring of all ranks, each with its own shard."""
        return cls(layout, layout, [RingTopology.of_all(layout.shards, moving)])


@dataclass(frozen=True)
class OnSequence:
    """A method on the sequence axis.

    Args:
        build: the method on an axis.
        comm_plan: what it sends and computes.
        forward_memory, backward_memory: what it allocates on so many ranks, in bytes (`memory.py`).
        takes: the options that it has.
        variants: options worth trying on so many ranks; none where another method is the same.
        shown: options that differ from what they are unless given, as they follow the name.
        layout: that of `Method.layout`, zigzag, from tokens and ranks.
        walk: who computes what, when a layout is as `layout` gives it; for pictures.
        published: for each rank, what the paper counts for forward under a full mask, in bytes: (p2p, in collectives).
    """

    build: Callable[[DeviceMesh, MethodOptions], Method]
    comm_plan: Callable[[AttentionShape, MethodOptions], CommPlan]
    forward_memory: Callable[[Sizes, int, MethodOptions], float]
    backward_memory: Callable[[Sizes, int, MethodOptions], float]
    takes: tuple[str, ...] = ()
    variants: Callable[[int], Iterable[MethodOptions]] = lambda ranks: (UNLESS_GIVEN,)
    shown: Callable[[MethodOptions], str] = lambda options: ""
    layout: Callable[[int, int, MethodOptions], SequenceLayout] = lambda n, ranks, _: SequenceLayout.zigzag(n, ranks)
    walk: Callable[[SequenceLayout, MethodOptions], RingWalk] | None = None
    published: Callable[[AttentionShape, MethodOptions], tuple[int, int]] | None = None


@dataclass(frozen=True)
class OnHeads:
    """A method on the head axis, around another.

    Args:
        build: the method on an axis, around another.
        comm_plan: what both send and compute on so many ranks of the head axis.
        forward_memory: what both allocate, in bytes, from what the other does at a time.
        backward_memory: likewise, for heads that come in these stages, and a rank that is or is not alone on the
            sequence axis, where dk and dv are in the inputs' dtype.
        projects_in_stages: as `Method.projects_in_stages`.
        heads_at_once: query heads of a stage on so many ranks; None: all.
        takes: the options that it has.
        variants: options worth trying for so many query heads on so many ranks.
        shown: as of `OnSequence`.
    """

    build: Callable[[DeviceMesh, Method, MethodOptions], Method]
    comm_plan: Callable[[AttentionShape, int, InnerPlan, MethodOptions], CommPlan]
    forward_memory: Callable[[Sizes, float], float]
    backward_memory: Callable[[Sizes, float, HeadStages, bool], float]
    projects_in_stages: bool = False
    heads_at_once: Callable[[int, MethodOptions], int | None] = lambda ranks, options: None
    takes: tuple[str, ...] = ()
    variants: Callable[[int, int], Iterable[MethodOptions]] = lambda heads, ranks: (UNLESS_GIVEN,)
    shown: Callable[[MethodOptions], str] = lambda options: ""
