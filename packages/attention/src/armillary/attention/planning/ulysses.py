"""Plan of `Ulysses`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.attention.planning.base import HeadPlan, InnerPlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Step, steps
from armillary.attention.planning.head_moves import HeadMoves
from armillary.attention.planning.memory import HeadStages, Sizes


@dataclass(frozen=True)
class UlyssesPlan(HeadPlan):
    """Plan of `Ulysses`."""

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan) -> CommPlan:
        moves = HeadMoves(work, ranks)
        heads = moves.heads
        queries, keys = (moves.sizes, heads.queries), (moves.key_sizes, heads.keys)
        q, v, e = work.batch * work.head_dim, work.batch * work.value_dim, work.e
        grad = work.a if heads.shared else e  # bytes of an element of dk and dv
        works = (
            replace(work, key_heads=heads.key_heads(work.key_heads, rank), kv_heads=len(heads.keys[rank]))
            for rank in range(ranks)
        )
        plan = moves.inner_plan(inner, tuple(works))
        qkv = Step((moves.to_heads(*queries, q * e), moves.to_heads(*keys, q * e), moves.to_heads(*keys, v * e)))
        grads = (moves.to_tokens(*queries, q * e), moves.to_tokens(*keys, q * grad), moves.to_tokens(*keys, v * grad))
        out, dout = Step((moves.to_tokens(*queries, v * e),)), Step((moves.to_heads(*queries, v * e),))
        return CommPlan(steps(qkv, *plan.forward, out), steps(dout, *plan.backward, Step(grads)))

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Received q, k and v, and the inner method."""
        return x.q + 2 * x.k + inner

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Received dout, if there are several ranks, and the inner method."""
        return (x.q if stages.ranks > 1 else 0) + inner
