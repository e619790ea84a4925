"""Attention on one rank: what every method reduces to where nothing is sharded."""

from __future__ import annotations

from torch import Tensor

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.comm_plan import AttentionShape, CommPlan, Step
from armillary.attention.memory import Sizes, kernel_backward, kernel_forward
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import OnSequence, RingWalk
from armillary.attention.tiling.merge import Merge, Sum


class Local(Method):
    """All keys are here: one block, no communication."""

    shards = 1
    shard = 0
    sequence_shards = 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        merged = Merge.of(q, v)
        spec.block(0, 0).forward(q, k, v, merged)
        out, lse = merged.result()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (Sum.like(x) for x in (saved.q, saved.k, saved.v))
        spec.block(0, 0).backward(dout, *saved, dq, dk, dv)
        return dq.result(), dk.result(), dv.result()


def comm_plan(work: AttentionShape) -> CommPlan:
    """What `Local` computes.

    Raises:
        ValueError: several shards.
    """
    if work.layout.shards > 1:
        raise ValueError(f"the layout has {work.layout.shards} shards; local attention is of one")
    attend = (Step(pairs=(work.grid.pairs(0, 0, work.batch) * len(work.key_heads),)),)
    return CommPlan(attend, attend)


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes) -> float:
    """One block."""
    return kernel_forward(x)


def backward_memory(x: Sizes) -> float:
    """One block; gradients stay as the kernel gave them."""
    return kernel_backward(x)


REGISTERED = OnSequence(
    build=lambda axis, _: Local(),
    comm_plan=lambda work, _: comm_plan(work),
    forward_memory=lambda x, ranks, _: forward_memory(x),
    backward_memory=lambda x, ranks, _: backward_memory(x),
    walk=lambda layout, _: RingWalk.of_ring(layout, "keys"),
)
