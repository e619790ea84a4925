"""DeepSpeed-Ulysses (arXiv 2309.14509), and USP (arXiv 2405.07719) as Ulysses around a sequence-axis method.

Sequence shards become head shards by an all-to-all, any method attends, and a second all-to-all brings the result back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.comm_plan import AttentionShape, CommPlan, Step, steps
from armillary.attention.memory import Sizes
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import InnerPlan, OnHeads
from armillary.attention.methods.head_axis import Arriving, HeadMethod, HeadMoves, HeadShards, split_heads
from armillary.core import Axis, SequenceLayout
from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.all_to_all import start_head_to_seq, start_seq_to_head


class HeadWork(NamedTuple):
    """A call, as the ranks of a head axis share it.

    Args:
        tokens, keys: of queries and of keys, on each rank of the axis.
        heads: of each rank.
        inside: the call as `inner` sees it: this rank's heads only.
    """

    tokens: tuple[int, ...]
    keys: tuple[int, ...]
    heads: HeadShards
    inside: AttentionSpec


class Ulysses(HeadMethod):
    """All-to-all over one mesh axis of U ranks, around `inner` (Local unless given). Around Ring it is USP.

    Rank u of the axis attends with its share of the heads, over all tokens of its sequence shard. U need not
    divide H: ranks may have unequal numbers of heads, and a key/value head goes to every rank whose query heads use it.

    Args:
        axis: a 1-D mesh, such as `mesh["ulysses"]`.
        inner: any method over other axes.

    Raises:
        ValueError: `inner` is no method, or works on this axis or on one that shares other ranks with it.

    Bytes sent, for e bytes an element and a an accumulated gradient element, where U divides H and T tokens: forward
    (U - 1) / U * (2 H + 2 max(K, U)) B T D e, backward (U - 1) / U * (2 H e + 2 max(K, U) c) B T D: dout there, dq and
    dk, dv back, where c = e, or a if ranks share key heads (K < U), whose sums are not finished. In general rank u,
    with h_u query heads and k_u key heads that these use, sends B D e (T_u sum (h_w + 2 k_w) + h_u sum T_w) forward
    and B D (T_u sum h_w e + (h_u e + 2 k_u c) sum T_w) backward, sums over the other ranks w. All of it all-to-all;
    `inner` sends besides what it does for its T U tokens and H / U heads.
    """

    def __init__(self, axis: DeviceMesh | Axis, inner: Method | None = None) -> None:
        super().__init__(axis, inner)
        self.redistributes_inputs = self.axis.size > 1 or self.inner.redistributes_inputs

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> Arriving:
        queries = split_heads(key_heads, self.axis.size).queries
        return start_seq_to_head(q, self.axis, self.sizes(layout), queries).wait

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        return self.forward_prefetched(None, q, k, v, spec)

    def forward_prefetched(
        self, started: Arriving | None, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Saved]:
        tokens, keys, heads, inside = self.work(spec)
        moving = (
            started or start_seq_to_head(q, self.axis, tokens, heads.queries).wait,
            start_seq_to_head(k, self.axis, keys, heads.keys).wait,
            start_seq_to_head(v, self.axis, keys, heads.keys).wait,
        )
        q, k, v = (arrive() for arrive in moving)
        del moving, started
        out, saved = self.inner.forward(q, k, v, inside)
        return start_head_to_seq(out, self.axis, tokens, heads.queries).wait(), saved

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        tokens, keys, heads, inside = self.work(spec)
        whole = start_seq_to_head(dout, self.axis, tokens, heads.queries).wait()
        dq, dk, dv = self.inner.backward(whole, saved, inside)
        # Where ranks share a key/value head, they are unfinished sums, in the accumulation dtype.
        dk, dv = (x.to(accumulation_dtype(dout.dtype) if heads.shared else dout.dtype) for x in (dk, dv))
        moving = (
            start_head_to_seq(dq.to(dout.dtype), self.axis, tokens, heads.queries),
            start_head_to_seq(dk, self.axis, keys, heads.keys),
            start_head_to_seq(dv, self.axis, keys, heads.keys),
        )
        dq, dk, dv = (move.wait() for move in moving)
        return dq, dk, dv

    def heads(self, heads: range) -> range:
        mine = SequenceLayout.contiguous(len(heads), self.axis.size).spans(self.axis.rank)[0]
        return self.inner.heads(heads[mine.start : mine.stop])

    def local_lse(self, saved: Saved, spec: AttentionSpec) -> Tensor:
        tokens, _, heads, inside = self.work(spec)
        lse = self.inner.local_lse(saved, inside).unsqueeze(-1)
        return start_head_to_seq(lse, self.axis, tokens, heads.queries).wait().squeeze(-1)

    def saved_like(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Saved:
        tokens, keys, heads, inside = self.work(spec)
        mine, own = len(heads.queries[self.axis.rank]), len(heads.keys[self.axis.rank])
        q = q.new_empty((q.shape[0], sum(tokens), mine, q.shape[3]))
        k, v = (x.new_empty((x.shape[0], sum(keys), own, x.shape[3])) for x in (k, v))
        if self.inner.redistributes_inputs:
            return self.inner.saved_like(q, k, v, inside)
        return Saved(
            q,
            k,
            v,
            q.new_empty((*q.shape[:3], v.shape[3])),
            q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)),
        )

    def work(self, spec: AttentionSpec) -> HeadWork:
        """The call on this rank."""
        axis, inner = self.axis, self.inner
        place = ("work", axis.rank, axis.size, inner.shard, inner.shards)
        return spec.once(place, lambda: self._found(spec))

    def _found(self, spec: AttentionSpec) -> HeadWork:
        heads = split_heads(spec.key_heads, self.axis.size)
        inside = spec.with_heads(heads.key_heads(spec.key_heads, self.axis.rank))
        return HeadWork(self.sizes(spec.layout), self.sizes(spec.key_layout), heads, inside)


def comm_plan(work: AttentionShape, ranks: int, inner: InnerPlan) -> CommPlan:
    """What `Ulysses` sends and computes on `ranks` ranks of the head axis, around a method on the sequence axis."""
    moves = HeadMoves(work, ranks)
    heads = moves.heads
    queries, keys = (moves.tokens, heads.queries), (moves.keys, heads.keys)
    q, v, e = work.batch * work.head_dim, work.batch * work.value_dim, work.e
    summed = work.a if heads.shared else e
    inside = moves.inside(inner, tuple(_inside(work, heads, u) for u in range(ranks)))
    bring = Step((moves.to_heads(*queries, q * e), moves.to_heads(*keys, q * e), moves.to_heads(*keys, v * e)))
    home = (moves.to_tokens(*queries, q * e), moves.to_tokens(*keys, q * summed), moves.to_tokens(*keys, v * summed))
    return CommPlan(
        steps(bring, *inside.forward, Step((moves.to_tokens(*queries, v * e),))),
        steps(Step((moves.to_heads(*queries, v * e),)), *inside.backward, Step(home)),
    )


def _inside(work: AttentionShape, heads: HeadShards, rank: int) -> AttentionShape:
    """The work as `inner` sees it: the heads of one rank of the head axis."""
    return replace(work, key_heads=heads.key_heads(work.key_heads, rank), kv_heads=len(heads.keys[rank]))


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes, inner: float) -> float:
    """q, k and v have arrived; then `inner`."""
    return x.q + 2 * x.k + inner


def backward_memory(x: Sizes, inner: float, ranks: int) -> float:
    """dout has arrived, where ranks divide the heads; then `inner`."""
    return (x.q if ranks > 1 else 0) + inner


REGISTERED = OnHeads(
    build=lambda axis, inner, _: Ulysses(axis, inner) if axis.size() > 1 else inner,
    comm_plan=lambda work, ranks, inner, _: comm_plan(work, ranks, inner),
    forward_memory=forward_memory,
    backward_memory=lambda x, inner, stages, alone: backward_memory(x, inner, stages.ranks),
)
