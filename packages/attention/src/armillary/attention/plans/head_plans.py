"""Plans of the methods on the head axis, `Ulysses` and `UPipe`: all-to-alls around the plan of an inner method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

from armillary.attention.call.spec import key_heads_of
from armillary.attention.methods.head_shards import check_heads, split_heads, stages_of
from armillary.attention.plans.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Payload,
    Step,
    Steps,
    overlap,
    send_to_each,
    side_by_side,
    steps,
)
from armillary.attention.plans.method_plan import HeadPlan, HeadStages, InnerPlan, Sizes
from armillary.attention.plans.node_ring_plans import GatheredLatents


@dataclass(frozen=True)
class UlyssesPlan(HeadPlan):
    """Plan of `Ulysses`."""

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan, rotates_latents: bool = False) -> CommPlan:
        moves = HeadMoves(work, ranks)
        heads = moves.heads
        queries, keys = (moves.sizes, heads.queries), moves.sent_keys(heads.keys)
        # Elements of one token and head, over all rows. Latents are one head, that every rank receives.
        q, v = work.batch * work.head_dim, work.batch * work.value_dim
        sent_k, sent_v = (q, v) if work.latent is None else (work.k, work.v)
        e = work.e  # bytes of an element
        # 1. q, k and v to heads.
        to_heads = moves.to_heads(*keys, "k", sent_k * e), moves.to_heads(*keys, "v", sent_v * e)
        # 2. The inner method on each rank's heads. 3. out back to tokens.
        rank_calls = tuple(
            replace(work, key_heads=heads.key_heads(work.key_heads, rank), kv_heads=len(heads.keys[rank]))
            for rank in range(ranks)
        )
        if work.latent is not None and rotates_latents and ranks > 1:
            plan, to_heads = GatheredLatents(work, ranks).ring_plan(rank_calls), ()
        else:
            plan = moves.inner_plan(inner, rank_calls)
        qkv = moves.to_heads(*queries, "q", q * e), *to_heads
        inner_forward, inner_backward = of_heads(plan.forward, heads.queries), of_heads(plan.backward, heads.queries)
        out, dout = moves.to_tokens(*queries, "out", v * e), moves.to_heads(*queries, "dout", v * e)
        # Backward: dout to heads, the inner method, and gradients back to tokens. Those of a key head that several
        # ranks share are partial sums, which are sent in the accumulation dtype.
        key_bytes = work.a if heads.has_shared_heads or work.latent is not None else e
        key_grads = moves.to_tokens(*keys, "dk", sent_k * key_bytes), moves.to_tokens(*keys, "dv", sent_v * key_bytes)
        grads = moves.to_tokens(*queries, "dq", q * e), *(key_grads if to_heads else ())
        return replace(
            plan,
            forward=steps(Step(qkv), *inner_forward, Step((out,))),
            backward=steps(Step((dout,)), *inner_backward, Step(grads)),
        )

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Received q, k and v, and the inner method."""
        return x.q + 2 * x.k + inner

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Received dout, if there are several ranks, and the inner method, or its gradients, sent and received."""
        grads = x.q + 2 * x.k * (1 if x.expanded is None else x.w)
        return x.out + max(inner, 3 * grads) if stages.ranks > 1 else inner


StageSteps = tuple[list[Move], Steps, list[Move]]
"""The moves before a stage of heads, the inner method's steps, and the moves after the stage."""


@dataclass(frozen=True)
class UPipePlan(HeadPlan):
    """Plan of `UPipe`."""

    heads_per_stage: int | None = None
    prefetch: bool = False

    projects_in_stages = True
    key_sends = 2

    def stage_keys(self, key_heads: tuple[int, ...], ranks: int) -> list[int]:
        return [stage.key_count for stage in stages_of(key_heads, ranks, self.heads_per_stage)]

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan, rotates_latents: bool = False) -> CommPlan:
        moves, stages = HeadMoves(work, ranks), stages_of(work.key_heads, ranks, self.heads_per_stage)
        q, v = work.batch * work.head_dim, work.batch * work.value_dim  # elements of one token and head, over all rows
        e = work.e  # bytes of an element
        stage_plan = partial(moves.inner_plan, inner)
        # 0. Latents are sent before the first stage, and their gradients after the last one.
        sent_latents, latent_grads = Steps(), Steps()
        if work.latent is not None:
            stages = [stage.without_rounds() for stage in stages]
            if rotates_latents and work.layout.shards > 1:
                latents = GatheredLatents(work, ranks)
                stage_plan, sent_latents, latent_grads = latents.stage_plan, latents.send(), latents.return_grads()
            else:
                keys = moves.sent_keys(())
                sent_latents = (Step((moves.to_heads(*keys, "k", work.k * e), moves.to_heads(*keys, "v", work.v * e))),)
                grads = moves.to_tokens(*keys, "dk", work.k * work.a), moves.to_tokens(*keys, "dv", work.v * work.a)
                latent_grads = (Step(grads),)
        stage_plan = cache(stage_plan)  # most stages are equal
        forward, backward, plans = list[StageSteps](), list[StageSteps](), list[CommPlan]()
        for stage in stages:
            queries, keys = (moves.sizes, stage.query_ranges), (moves.key_sizes, stage.received_keys.ranges)
            # 1. To heads: k and v of keys whose round starts, and q; in backward also out and dout.
            sent = [
                moves.to_heads(*keys, "k", q * e),
                moves.to_heads(*keys, "v", v * e),
                moves.to_heads(*queries, "q", q * e),
            ]
            outs = [moves.to_heads(*queries, name, v * e) for name in ("out", "dout")]
            # 2. The inner method, on the heads of the stage.
            rank_calls = tuple(
                replace(work, key_heads=heads.key_heads(work.key_heads), kv_heads=len(heads.keys))
                if heads.queries
                else None
                for heads in stage.by_rank
            )
            stage_heads = [heads.queries for heads in stage.by_rank]
            plans.append(plan := stage_plan(rank_calls))
            # 3. Back to tokens: out; in backward dq, and dk and dv of keys whose round ends. Gradients of a key head
            #    that several ranks share are partial sums, which are sent in the accumulation dtype.
            returned_keys = moves.key_sizes, stage.returned_keys.ranges
            key_bytes = work.a if stage.returned_keys.has_shared_heads else e
            grads = [
                moves.to_tokens(*queries, "dq", q * e),
                moves.to_tokens(*returned_keys, "dk", q * key_bytes),
                moves.to_tokens(*returned_keys, "dv", v * key_bytes),
            ]
            out = [moves.to_tokens(*queries, "out", v * e)]
            forward.append((sent, of_heads(plan.forward, stage_heads), out))
            backward.append((sent + outs, of_heads(plan.backward, stage_heads), grads))
        # A call on q, k and v saves lse by tokens, a call on hidden states by heads, which needs no all-to-all.
        forward_end, backward_start = Step(), Step()
        if not work.projected:
            lse = (moves.sizes, moves.heads.queries, "lse", work.batch * work.a)
            forward_end, backward_start = Step((moves.to_tokens(*lse),)), Step((moves.to_heads(*lse),))
        return replace(
            plans[0],  # whose blocks have the shards of all stages
            forward=steps(*sent_latents, *self._in_order(forward), forward_end),
            backward=steps(backward_start, *sent_latents, *self._in_order(backward), *latent_grads),
        )

    def _in_order(self, stages: Sequence[StageSteps]) -> Iterator[Step]:
        # With `prefetch` the tensors of a stage are in flight at once, during the stage before; otherwise they are sent
        # one after another before the stage. Results return one after another.
        for i, (sent, inner_steps, returned) in enumerate(stages):
            next_sent = list[Move]()
            if self.prefetch:
                if i == 0:
                    yield Step(tuple(sent))
                next_sent = stages[i + 1][0] if i + 1 < len(stages) else []
            else:
                yield from (Step((move,)) for move in sent)
            yield from overlap(next_sent, inner_steps)
            yield from (Step((move,)) for move in returned)

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Received q, k and v of a stage, and the inner method, without `prefetch`."""
        return x.q + 2 * x.k + inner

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Received q, out, dout, k and v of a stage, the sums of dk and dv of the round, and the inner method."""
        # On one rank with one stage, out and dout need no copies. With several stages, the kernel needs a copy of the
        # stage's heads.
        outs = 2 * x.out if stages.ranks > 1 or stages.has_several_stages else 0
        # A round of one stage has no sums. At the peak of a round of two stages, the sums are the first stage's dk and
        # dv in their own dtype; with more stages they are in float32.
        sum_width = 1 if alone and stages.stages_per_round == 2 else x.w
        sums = 0 if stages.stages_per_round == 1 else 2 * x.k * sum_width
        return x.q + outs + 2 * x.k + sums + inner


def head_stages(heads: int, key_heads: int, ranks: int, heads_per_stage: int | None = None) -> HeadStages:
    """Returns the stages of the first rank of a head axis; `heads_per_stage=None`: all heads in one stage."""
    schedule = [stage.by_rank[0] for stage in stages_of(key_heads_of(heads, key_heads), ranks, heads_per_stage)]
    stages_per_round = next(i for i, stage in enumerate(schedule) if stage.ends_round) + 1
    queries, keys = len(schedule[0].queries), len(schedule[0].keys)
    several_stages, several_rounds = len(schedule) > 1, len(schedule) > stages_per_round
    return HeadStages(ranks, queries, keys, stages_per_round, several_stages, several_rounds)


class HeadMoves:
    """All-to-alls of a call on P x U ranks, in P groups of U.

    Raises:
        ValueError: fewer query heads than U.
    """

    def __init__(self, work: AttentionShape, ranks: int) -> None:
        check_heads(len(work.key_heads), ranks)
        self.work, self.ranks = work, ranks
        self.heads = split_heads(work.key_heads, ranks)
        self.sizes, self.key_sizes = work.layout.refine(ranks).sizes, work.key_layout.refine(ranks).sizes

    def sent_keys(self, heads: Sequence[range]) -> tuple[Sequence[int], Sequence[range]]:
        """Returns the keys of an all-to-all: the tokens of each of the P x U ranks, and the heads that each receives.

        Args:
            heads: the key/value heads of each rank of the head axis. Latents are one head, that every rank receives.
        """
        return self.key_sizes, heads if self.work.latent is None else [range(1)] * self.ranks

    def to_heads(self, sizes: Sequence[int], heads: Sequence[range], tensor: str, size: int) -> Move:
        """Returns the all-to-all of a tensor from sequence shards to head shards.

        Args:
            sizes: for each of the P x U ranks, the tokens of its sequence shard.
            heads: for each rank of the head axis, its heads.
            size: bytes of one token and head.
        """
        return head_exchange(tuple(sizes), tuple(map(len, heads)), tensor, size, to_tokens=False)

    def to_tokens(self, sizes: Sequence[int], heads: Sequence[range], tensor: str, size: int) -> Move:
        """Returns the all-to-all from head shards back to sequence shards. Arguments as in `to_heads`."""
        return head_exchange(tuple(sizes), tuple(map(len, heads)), tensor, size, to_tokens=True)

    def inner_plan(self, inner: InnerPlan, rank_calls: tuple[AttentionShape | None, ...]) -> CommPlan:
        """Returns the plan of the inner method on all P x U ranks.

        Args:
            rank_calls: for each rank of the head axis, the call with its heads only; None for a rank without heads.
        """
        plans = {call: inner(call) for call in rank_calls if call}  # most ranks have equal calls
        total = self.work.layout.shards * self.ranks
        inner_plans = [(plans[call], range(u, total, self.ranks)) for u, call in enumerate(rank_calls) if call]
        # The first plan's `query_shards` and `key_shards` are those of all plans.
        return replace(
            inner_plans[0][0],
            forward=side_by_side([(plan.forward, ranks) for plan, ranks in inner_plans], total),
            backward=side_by_side([(plan.backward, ranks) for plan, ranks in inner_plans], total),
        )


@lru_cache(maxsize=1024)  # the stages of UPipe have equal ones, and so have all methods around which a search puts it
def head_exchange(sizes: tuple[int, ...], heads: tuple[int, ...], tensor: str, size: int, to_tokens: bool) -> Move:
    """Returns the all-to-all of a tensor in each group of U ranks, from numbers of heads; `to_tokens`: the way back."""
    ranks = len(heads)
    groups = [range(first, first + ranks) for first in range(0, len(sizes), ranks)]

    def count(source: int, target: int) -> int:
        return sizes[target] * heads[source % ranks] if to_tokens else sizes[source] * heads[target % ranks]

    return send_to_each("all_to_all", "ulysses", groups, Payload((tensor,), size), count)


def of_heads(inner_steps: Steps, heads: Sequence[Sequence[int]]) -> Steps:
    return tuple(step._replace(heads=tuple(heads)) if step.pairs else step for step in inner_steps)
