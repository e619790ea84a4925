"""Plans of the methods on the head axis, `Ulysses` and `UPipe`: all-to-alls around the plan of an inner method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from armillary.attention.call.spec import key_heads_of
from armillary.attention.methods.head_shards import check_heads, split_heads
from armillary.attention.methods.stages import RankHeads, Stage, stages_of
from armillary.attention.planning.base import HeadPlan, InnerPlan
from armillary.attention.planning.comm_plan import (
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
from armillary.attention.planning.memory import HeadStages, Sizes


class HeadMoves:
    """All-to-alls of a call on P x U ranks, in P groups of U.

    Args:
        work: the call, with layouts over the P ranks of the sequence axis.
        ranks: U.

    Raises:
        ValueError: fewer query heads than U.
    """

    def __init__(self, work: AttentionShape, ranks: int) -> None:
        check_heads(len(work.key_heads), ranks)
        self.work, self.ranks = work, ranks
        self.heads = split_heads(work.key_heads, ranks)
        self.sizes, self.key_sizes = work.layout.refine(ranks).sizes, work.key_layout.refine(ranks).sizes

    def to_heads(self, sizes: Sequence[int], heads: Sequence[range], tensor: str, size: int) -> Move:
        """Returns the all-to-all of a tensor from sequence shards to head shards.

        Args:
            sizes: for each of the P x U ranks, the tokens of its sequence shard.
            heads: for each rank of the head axis, its heads.
            tensor: name of the tensor.
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
    """Returns the all-to-all of a tensor in each group of U ranks. Arguments as in `HeadMoves.to_heads`.

    Args:
        heads: for each rank of the head axis, its number of heads.
        to_tokens: True for the way back, on which a rank sends its heads of the tokens of another rank.
    """
    ranks = len(heads)
    groups = [range(first, first + ranks) for first in range(0, len(sizes), ranks)]

    def count(source: int, target: int) -> int:
        return sizes[target] * heads[source % ranks] if to_tokens else sizes[source] * heads[target % ranks]

    return send_to_each("all_to_all", "ulysses", groups, Payload((tensor,), size), count)


def of_heads(inner_steps: Steps, heads: Sequence[Sequence[int]]) -> Steps:
    """Returns the inner method's steps with `Step.heads` set.

    Args:
        heads: for each rank of the head axis, the query heads that it computes.
    """
    return tuple(step._replace(heads=tuple(heads)) if step.pairs else step for step in inner_steps)


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


@dataclass(frozen=True)
class UPipePlan(HeadPlan):
    """Plan of `UPipe`."""

    heads_per_stage: int | None = None
    prefetch: bool = False

    projects_in_stages = True

    def comm_plan(self, work: AttentionShape, ranks: int, inner: InnerPlan) -> CommPlan:
        moves = HeadMoves(work, ranks)
        inner_plan = lru_cache(partial(moves.inner_plan, inner))  # most stages are equal
        stages = stages_of(work.key_heads, ranks, self.heads_per_stage)
        staged_steps = StagedSteps(moves, inner_plan, stages, self.prefetch)
        q, v = work.batch * work.head_dim * work.e, work.batch * work.value_dim * work.e
        sent_tensors = {"q": q, "out": v, "dout": v}
        forward = staged_steps.steps({"q": q}, lambda plan: plan.forward, staged_steps.return_out)
        backward = staged_steps.steps(sent_tensors, lambda plan: plan.backward, staged_steps.return_grads)
        # A call on q, k and v saves lse by tokens, a call on hidden states by heads, which needs no all-to-all.
        forward_end, backward_start = Step(), Step()
        if not work.projected:
            lse = (moves.sizes, moves.heads.queries, "lse", work.batch * work.a)
            forward_end, backward_start = Step((moves.to_tokens(*lse),)), Step((moves.to_heads(*lse),))
        return replace(
            staged_steps.inner_plan_of(stages[0]),  # whose blocks have the shards of all stages
            forward=steps(*forward, forward_end),
            backward=steps(backward_start, *backward),
        )

    def forward_memory(self, x: Sizes, inner: float) -> float:
        """Received q, k and v of a stage, and the inner method, without `prefetch`."""
        return x.q + 2 * x.k + inner

    def backward_memory(self, x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
        """Received q, out, dout, k and v of a stage, the sums of dk and dv of the round, and the inner method."""
        # On one rank with one stage, out and dout need no copies. With several stages, the kernel needs a copy of the
        # stage's heads.
        outs = 2 * x.q if stages.ranks > 1 or stages.has_several_stages else 0
        # A round of one stage has no sums. At the peak of a round of two stages, the sums are the first stage's dk and
        # dv in their own dtype; with more stages they are in float32.
        sum_width = 1 if alone and stages.stages_per_round == 2 else x.w
        sums = 0 if stages.stages_per_round == 1 else 2 * x.k * sum_width
        return x.q + outs + 2 * x.k + sums + inner


@dataclass(frozen=True)
class StagedSteps:
    """Steps of each stage of a call, on all ranks.

    Args:
        inner_plan: returns the plan of the inner method on all ranks (`HeadMoves.inner_plan`), given the call of each
            rank of the head axis.
        prefetch: True if the tensors of a stage are sent during the stage before.
    """

    moves: HeadMoves
    inner_plan: Callable[[tuple[AttentionShape | None, ...]], CommPlan]
    stages: tuple[Stage, ...]
    prefetch: bool

    def steps(
        self,
        query_bytes: Mapping[str, int],
        inner_steps: Callable[[CommPlan], Steps],
        returns: Callable[[Stage], Sequence[Move]],
    ) -> Iterator[Step]:
        """Yields the steps of forward or backward.

        Args:
            query_bytes: for each query-sized tensor that is sent, by name, its bytes per token and query head.
            inner_steps: takes forward or backward of the inner plan.
            returns: returns the moves after a stage, which run one after another.
        """
        sends = [self._sends(stage, query_bytes) for stage in self.stages]
        for i, stage in enumerate(self.stages):
            # With prefetch the tensors of a stage are in flight at once, during the stage before; otherwise they are
            # sent one after another before the stage.
            if i == 0 and self.prefetch:
                yield Step(tuple(sends[i]))
            elif not self.prefetch:
                yield from (Step((move,)) for move in sends[i])
            next_sends = sends[i + 1] if self.prefetch and i + 1 < len(sends) else []
            heads = [rank_heads.queries for rank_heads in stage.by_rank]
            yield from overlap(next_sends, of_heads(inner_steps(self.inner_plan_of(stage)), heads))
            yield from (Step((move,)) for move in returns(stage))

    def return_out(self, stage: Stage) -> list[Move]:
        """Returns the all-to-all that sends a stage's out from heads back to tokens."""
        work, moves = self.moves.work, self.moves
        return [moves.to_tokens(moves.sizes, stage.query_ranges, "out", work.batch * work.value_dim * work.e)]

    def return_grads(self, stage: Stage) -> list[Move]:
        """Returns the all-to-alls of dq, and of dk and dv of keys whose round ends."""
        work, moves, returned_keys = self.moves.work, self.moves, stage.returned_keys
        # Gradients of a key head that several ranks share are partial sums, which are sent in the accumulation dtype.
        element_bytes = work.a if returned_keys.has_shared_heads else work.e
        dq = moves.to_tokens(moves.sizes, stage.query_ranges, "dq", work.batch * work.head_dim * work.e)
        key_bytes = {
            "dk": work.batch * work.head_dim * element_bytes,
            "dv": work.batch * work.value_dim * element_bytes,
        }
        return [dq, *(moves.to_tokens(moves.key_sizes, returned_keys.ranges, *tensor) for tensor in key_bytes.items())]

    def _sends(self, stage: Stage, query_bytes: Mapping[str, int]) -> list[Move]:
        """Returns the all-to-alls before a stage: k and v of keys whose round starts, then tensors of queries."""
        work, moves = self.moves.work, self.moves
        key_bytes = {"k": work.batch * work.head_dim * work.e, "v": work.batch * work.value_dim * work.e}
        keys = [moves.to_heads(moves.key_sizes, stage.received_keys.ranges, *tensor) for tensor in key_bytes.items()]
        return [*keys, *(moves.to_heads(moves.sizes, stage.query_ranges, *tensor) for tensor in query_bytes.items())]

    def inner_plan_of(self, stage: Stage) -> CommPlan:
        """Returns the inner method's plan of a stage, on all ranks."""
        work = self.moves.work

        def part(heads: RankHeads) -> AttentionShape | None:
            if not heads.queries:
                return None
            return replace(work, key_heads=heads.key_heads(work.key_heads), kv_heads=len(heads.keys))

        return self.inner_plan(tuple(map(part, stage.by_rank)))


def head_stages(heads: int, key_heads: int, ranks: int, heads_per_stage: int | None = None) -> HeadStages:
    """Returns the stages of the first rank of a head axis of `ranks` ranks.

    Args:
        heads_per_stage: query heads of a stage, on all ranks together; None: all heads in one stage.
    """
    schedule = [stage.by_rank[0] for stage in stages_of(key_heads_of(heads, key_heads), ranks, heads_per_stage)]
    stages_per_round = next(i for i, stage in enumerate(schedule) if stage.ends_round) + 1
    queries, keys = len(schedule[0].queries), len(schedule[0].keys)
    several_stages, several_rounds = len(schedule) > 1, len(schedule) > stages_per_round
    return HeadStages(ranks, queries, keys, stages_per_round, several_stages, several_rounds)
