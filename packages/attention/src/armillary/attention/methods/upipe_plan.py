"""What UPipe sends, computes and allocates, stage by stage: pure functions of head counts and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from armillary.attention.call.spec import key_heads_of
from armillary.attention.comm_plan import AttentionShape, CommPlan, Move, Step, Steps, beside, steps
from armillary.attention.memory import HeadStages, Sizes
from armillary.attention.methods.entry import InnerPlan
from armillary.attention.methods.head_axis import HeadMoves, split_heads
from armillary.attention.methods.stages import Share, Stage, stages
from armillary.core.checked import integer


def stages_of(key_heads: tuple[int, ...], ranks: int, heads_per_stage: int | None) -> tuple[Stage, ...]:
    """The stages of a call, all heads in one unless told otherwise."""
    every = -(-len(key_heads) // ranks) * ranks
    return stages(key_heads, split_heads(key_heads, ranks).queries, min(heads_per_stage or every, every))


def heads_of(heads_per_stage: int | None, ranks: int) -> int | None:
    """Query heads of a stage, if they go round; None: all of them."""
    if heads_per_stage is None:
        return None
    found = integer("heads_per_stage", heads_per_stage)
    if found < 1 or found % ranks:
        raise ValueError(f"heads_per_stage={heads_per_stage} must be a positive multiple of {ranks} ranks")
    return found


# -- what is sent and computed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagesPlan:
    """The steps of each stage of a call, on all ranks.

    Args:
        inner: the plan inside, from what each rank of the head axis has to do; None: nothing.
    """

    moves: HeadMoves
    inner: Callable[[tuple[AttentionShape | None, ...]], CommPlan]
    plan: tuple[Stage, ...]
    prefetch: bool

    def walk(
        self, columns: Sequence[int], inside: Callable[[CommPlan], Steps], home: Callable[[Stage], Sequence[Move]]
    ) -> Iterator[Step]:
        """What `UPipe` does at each stage.

        Args:
            columns: bytes of what comes in for each query head and token.
            inside: forward or backward of the inner method.
            home: what goes back, one after another.
        """
        coming = [self._bring(stage, columns) for stage in self.plan]
        for i, stage in enumerate(self.plan):
            if i == 0 or not self.prefetch:
                yield from [Step(tuple(coming[i]))] if self.prefetch else [Step((one,)) for one in coming[i]]
            early = coming[i + 1] if self.prefetch and i + 1 < len(coming) else []
            yield from beside(early, inside(self._inside(stage)))
            yield from (Step((one,)) for one in home(stage))

    def out_home(self, stage: Stage) -> list[Move]:
        """The output of a stage."""
        work, moves = self.moves.work, self.moves
        return [moves.to_tokens(moves.tokens, stage.query_ranges, work.batch * work.value_dim * work.e)]

    def gradients_home(self, stage: Stage) -> list[Move]:
        """dq of a stage, and dk, dv of keys that are done with: wider where ranks share a head."""
        work, moves, leaving = self.moves.work, self.moves, stage.leaving
        width = work.a if leaving.shared else work.e
        keys = (work.batch * dim * width for dim in (work.head_dim, work.value_dim))
        dq = moves.to_tokens(moves.tokens, stage.query_ranges, work.batch * work.head_dim * work.e)
        return [dq, *(moves.to_tokens(moves.keys, leaving.ranges, size) for size in keys)]

    def _bring(self, stage: Stage, columns: Sequence[int]) -> list[Move]:
        work, moves = self.moves.work, self.moves
        keys = [work.batch * dim * work.e for dim in (work.head_dim, work.value_dim)]
        coming = [moves.to_heads(moves.keys, stage.arriving.ranges, size) for size in keys]
        return [*coming, *(moves.to_heads(moves.tokens, stage.query_ranges, size) for size in columns)]

    def _inside(self, stage: Stage) -> CommPlan:
        """The inner method on the heads of a stage; a rank without any waits."""
        work = self.moves.work

        def of(share: Share) -> AttentionShape | None:
            if not share.queries:
                return None
            return replace(work, key_heads=share.key_heads(work.key_heads), kv_heads=len(share.keys))

        return self.inner(tuple(of(share) for share in stage.shares))


def comm_plan(
    work: AttentionShape,
    ranks: int,
    inner: InnerPlan,
    heads_per_stage: int | None = None,
    prefetch: bool = False,
) -> CommPlan:
    """What `UPipe` with these options sends and computes on `ranks` ranks of the head axis, around a method."""
    heads_per_stage = heads_of(heads_per_stage, ranks)
    moves = HeadMoves(work, ranks)
    inside = lru_cache(partial(moves.inside, inner))  # stages are much alike
    walk = StagesPlan(moves, inside, stages_of(work.key_heads, ranks, heads_per_stage), prefetch)
    q, v, lse = work.batch * work.head_dim * work.e, work.batch * work.value_dim * work.e, work.batch * work.a
    queries = (moves.tokens, moves.heads.queries)
    forward = walk.walk([q], lambda inner: inner.forward, walk.out_home)
    backward = walk.walk([q, v, v], lambda inner: inner.backward, walk.gradients_home)
    there, back = (Step(() if work.projected else (way(*queries, lse),)) for way in (moves.to_heads, moves.to_tokens))
    return CommPlan(steps(*forward, back), steps(there, *backward))


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes, inner: float) -> float:
    """A stage: q, k and v have arrived; then `inner`."""
    return x.q + 2 * x.k + inner


def backward_memory(x: Sizes, inner: float, stages: HeadStages, alone: bool) -> float:
    """A stage: q, out, dout, k and v have arrived, then `inner`; and there are sums of dk and dv of the round so far.

    With one rank, out and dout are where they were; where only several stages make up the whole, the kernel has them
    copied, as heads of a stage do not lie together. Sums are as the first stage gave them, and in float32 from the
    second on.

    Args:
        alone: on the sequence axis, where `inner` gives dk and dv in the inputs' dtype; else in float32.
    """
    outs = 2 * x.q if stages.ranks > 1 or stages.several else 0
    sums = 0 if stages.turns == 1 else 2 * x.k * (1 if alone and stages.turns == 2 else x.w)
    return x.q + outs + 2 * x.k + sums + inner


def head_stages(heads: int, key_heads: int, ranks: int, heads_per_stage: int | None = None) -> HeadStages:
    """How heads come to the first of so many ranks, all in one stage unless told otherwise."""
    shares = [stage.shares[0] for stage in stages_of(key_heads_of(heads, key_heads), ranks, heads_per_stage)]
    turns = next(i for i, share in enumerate(shares) if share.last) + 1
    return HeadStages(ranks, len(shares[0].queries), len(shares[0].keys), turns, len(shares) > 1, turns < len(shares))
