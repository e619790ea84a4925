"""Plan of `Local`."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.attention.planning.base import RingWalk, SequencePlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Step
from armillary.attention.planning.memory import Sizes, kernel_backward, kernel_forward
from armillary.core import SequenceLayout


@dataclass(frozen=True)
class LocalPlan(SequencePlan):
    """Plan of `Local`: one block, no communication."""

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        """Raises ValueError for several shards."""
        if work.layout.shards > 1:
            raise ValueError(f"the layout has {work.layout.shards} shards; local attention is of one")
        attend = (Step(pairs=(work.grid.pairs(0, 0, work.batch) * len(work.key_heads),)),)
        return CommPlan(attend, attend)

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        return kernel_forward(x)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return kernel_backward(x)

    def walk(self, layout: SequenceLayout) -> RingWalk:
        return RingWalk.of_ring(layout, "keys")
