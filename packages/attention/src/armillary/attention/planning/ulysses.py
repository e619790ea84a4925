"""Plan of `Ulysses`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.attention.planning.base import HeadPlan, InnerPlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Step, steps
from armillary.attention.planning.head_moves import HeadMoves, of_heads
from armillary.attention.planning.memory import HeadStages, Sizes


@dataclass(frozen=True)
class UlyssesPlan(HeadPlan):
    """Plan of `Ulysses`."""

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan) -> CommPlan:
        moves = HeadMoves(work, ranks)
        heads = moves.heads
        queries, keys = (moves.sizes, heads.queries), (moves.key_sizes, heads.keys)
        q, v = work.batch * work.head_dim, work.batch * work.value_dim  # elements of one token and head, over all rows
        e = work.e  # bytes of an element
        # Gradients of a key head that several ranks share are partial sums, which are sent in the accumulation dtype.
        grad = work.a if heads.has_shared_heads else e
        rank_calls = (
            replace(work, key_heads=heads.key_heads(work.key_heads, rank), kv_heads=len(heads.keys[rank]))
            for rank in range(ranks)
        )
        plan = moves.inner_plan(inner, tuple(rank_calls))
        qkv = (
            moves.to_heads(*queries, "q", q * e),
            moves.to_heads(*keys, "k", q * e),
            moves.to_heads(*keys, "v", v * e),
        )
        grads = (
            moves.to_tokens(*queries, "dq", q * e),
            moves.to_tokens(*keys, "dk", q * grad),
            moves.to_tokens(*keys, "dv", v * grad),
        )
        out, dout = moves.to_tokens(*queries, "out", v * e), moves.to_heads(*queries, "dout", v * e)
        forward, backward = (of_heads(inner_steps, heads.queries) for inner_steps in (plan.forward, plan.backward))
        return replace(
            plan,
            forward=steps(Step(qkv), *forward, Step((out,))),
            backward=steps(Step((dout,)), *backward, Step(grads)),
        )

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Received q, k and v, and the inner method."""
        return x.q + 2 * x.k + inner

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Received dout, if there are several ranks, and the inner method."""
        return (x.q if stages.ranks > 1 else 0) + inner
