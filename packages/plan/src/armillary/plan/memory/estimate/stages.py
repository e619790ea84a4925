"""In which stages heads come to the ranks of the head axis."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.attention.methods.head_axis import split_heads
from armillary.attention.methods.stages import stages
from armillary.attention.spec import key_heads_of


@dataclass(frozen=True)
class HeadStages:
    """How heads come to the first rank of the head axis.

    Args:
        queries, keys: heads of a stage.
        turns: stages of a round, which share keys.
        several: whether there is more than one stage.
        rounds: whether there is more than one round.
    """

    queries: int
    keys: int
    turns: int
    several: bool
    rounds: bool

    @classmethod
    def of(cls, heads: int, key_heads: int, ranks: int, heads_per_stage: int) -> HeadStages:
        of_query = key_heads_of(heads, key_heads)
        plan = [s.shares[0] for s in stages(of_query, split_heads(of_query, ranks).queries, heads_per_stage)]
        turns = next(i for i, share in enumerate(plan) if share.last) + 1
        return cls(len(plan[0].queries), len(plan[0].keys), turns, len(plan) > 1, turns < len(plan))
