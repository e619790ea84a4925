"""Building blocks of plans on the head axis: its all-to-alls, and the steps of the inner method on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from armillary.attention.methods.head_shards import check_heads, split_heads
from armillary.attention.planning.base import InnerPlan
from armillary.attention.planning.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Payload,
    Steps,
    send_to_each,
    side_by_side,
)


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
