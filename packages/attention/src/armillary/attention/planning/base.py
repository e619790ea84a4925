"""The base classes of plans. A plan is a method's communication plan and its memory formulas, each optional."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from armillary.attention.mask import AttentionMask, layout_of
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan
from armillary.attention.planning.memory import HeadStages, Sizes
from armillary.core import SequenceLayout
from armillary.core.parts import Side

InnerPlan = Callable[[AttentionShape], CommPlan]
"""Returns the communication plan of a method on the sequence axis."""


@dataclass(frozen=True)
class MethodPlan:
    """Base of `SequencePlan` and `HeadPlan`.

    The fields of a subclass are the method's options. `comm_plan` and the formulas of memory raise a ValueError that
    names the method, unless a subclass overrides them.

    Args:
        method: name of the method, for errors.
    """

    method: str = field(default="?", kw_only=True, compare=False)

    def missing(self, function: str) -> ValueError:
        """Returns the error for a function that the method's plan does not override."""
        return ValueError(
            f"attention method {self.method!r} has no {function}: its plan in the registry must define it"
        )


class SequencePlan(MethodPlan):
    """Plan of a method on the sequence axis."""

    def layout(
        self, length: int, ranks: int, kind: str = "zigzag", mask: AttentionMask | None = None
    ) -> SequenceLayout:
        """Returns the layout of the method over `ranks` ranks, as `Method.layout`."""
        return layout_of(kind, length, ranks, mask, self.balanced_by)

    @property
    def balanced_by(self) -> Side | None:
        """The side whose work a balanced layout makes even, as in `Method.balanced_by`."""
        return "queries"

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        """Returns the communication plan over the shards of `work`."""
        raise self.missing("comm_plan")

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Returns the peak memory of forward on `ranks` ranks, in bytes (`planning/memory.py`)."""
        raise self.missing("forward_memory")

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Returns the peak memory of backward on `ranks` ranks, in bytes."""
        raise self.missing("backward_memory")

    def published_bytes(self, work: AttentionShape) -> tuple[int, int] | None:
        """Returns the paper's (p2p, collective) bytes of one rank in forward under a full mask, or None."""
        return None


class HeadPlan(MethodPlan):
    """Plan of a method on the head axis, around a method on the sequence axis."""

    projects_in_stages = False
    """True if the method projects q, k and v in stages, as in `Method.projects_in_stages`."""

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan) -> CommPlan:
        """Returns the communication plan of both methods on `ranks` ranks of the head axis.

        Args:
            work: the call, with layouts over the sequence axis.
            inner: returns the plan of the method on the sequence axis, for a call with some of the heads.
        """
        raise self.missing("comm_plan")

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Returns the peak memory of forward, in bytes.

        Args:
            x: sizes of a call with the heads of one stage and the tokens of a shard of the sequence axis.
            inner: peak of the inner method in such a call.
        """
        raise self.missing("forward_memory")

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Returns the peak memory of backward, in bytes.

        Args:
            x, inner: as in `forward_memory`.
            stages: the stages of heads.
            alone: True if the sequence axis has one rank: then the inner method returns dk and dv in the inputs' dtype.
        """
        raise self.missing("backward_memory")
