"""Plan of `TokenRing`, and the steps of a ring of queries in backward, which `Ring` has too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.attention.planning.base import SequencePlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Steps
from armillary.attention.planning.memory import Sizes, kernel_forward, rotate_queries_backward
from armillary.attention.planning.rotation import TokenSends, direct_reduce_sends, rotation_steps
from armillary.attention.rotation.topology import RingTopology
from armillary.core.parts import Side


@dataclass(frozen=True)
class TokenRingPlan(SequencePlan):
    """Plan of `TokenRing`."""

    @property
    def balanced_by(self) -> Side:
        return "keys"

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        rings = [RingTopology.of_all(work.layout.shards, "queries")]
        forward = rotation_steps(work, rings, work.payload("q"), work.payload("out", "lse"), direct_reduce_sends)
        return CommPlan(forward, pass_queries_backward_steps(work, rings, direct_reduce_sends))

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak at the second or third step, when the step's partial result is copied into the buffer to be sent."""
        if ranks == 1:
            return kernel_forward(x)
        # Results: this rank's own, the step's and its copy, and a buffer that receives one for half of the tokens.
        results = (1 + 1 + 1 + 0.5) * kernel_forward(x)
        # Queries in use and, except at the last step, queries that arrive.
        second = x.q * min(ranks - 1, 2)
        # Before the third step, the first returned result was merged into this rank's own one, in float32 from then on.
        third = x.q * min(ranks - 2, 2) + (x.w - 1) * x.q if ranks > 2 else 0
        return results + max(second, third)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return rotate_queries_backward(x, ranks, direct=True)


def pass_queries_backward_steps(
    work: AttentionShape, rings: Sequence[RingTopology], returned_tokens: TokenSends
) -> Steps:
    """Returns the steps of `pass_queries_backward` on all ranks of some rings."""
    rotating_payload = work.payload("q", "out", "dout", "lse")
    return rotation_steps(work, rings, rotating_payload, work.payload("dq"), returned_tokens)
