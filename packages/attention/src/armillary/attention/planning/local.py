"""Plan of `Local`."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.attention.planning.base import SequencePlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Step
from armillary.attention.planning.memory import Sizes, kernel_backward, kernel_forward


@dataclass(frozen=True)
class LocalPlan(SequencePlan):
    """Plan of `Local`: one block, no communication."""

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        """Returns a plan of one step. Raises ValueError for several shards."""
        if work.layout.shards > 1:
            raise ValueError(f"the layout has {work.layout.shards} shards; local attention needs 1")
        pairs = work.grid.pairs(0, 0, work.batch) * len(work.key_heads)
        attend = (Step(pairs=(pairs,), blocks=((0, 0),)),)
        return CommPlan(attend, attend)

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        return kernel_forward(x)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return kernel_backward(x)
