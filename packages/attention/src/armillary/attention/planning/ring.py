"""Plan of `Ring`, and the steps of a ring of keys, which `WallFacer` uses too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from armillary.attention.methods.ring import Backward, cheaper_side, check_backward
from armillary.attention.planning.base import SequencePlan
from armillary.attention.planning.comm_plan import AttentionShape, CommPlan, Steps
from armillary.attention.planning.memory import (
    Sizes,
    rotate_keys_backward,
    rotate_keys_forward,
    rotate_queries_backward,
)
from armillary.attention.planning.rotation import ring_reduce_sends, rotation_steps
from armillary.attention.planning.token_ring import pass_queries_backward_steps
from armillary.attention.rotation.topology import RingTopology, RotatingSide
from armillary.core.parts import Side


@dataclass(frozen=True)
class RingPlan(SequencePlan):
    """Plan of `Ring`.

    Raises:
        ValueError: an unknown `backward`.
    """

    backward: Backward = "auto"

    def __post_init__(self) -> None:
        check_backward(self.backward)

    @property
    def balanced_by(self) -> Side:
        return "both" if self.backward == "queries" else "queries"

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        def rings(side: RotatingSide) -> list[RingTopology]:
            return [RingTopology.of_all(work.layout.shards, side)]

        return CommPlan(ring_forward_steps(work, rings("keys")), ring_backward_steps(work, self.backward, rings))

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        return rotate_keys_forward(x, ranks)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        return ring_backward_memory(x, ranks, self.backward)

    def published_bytes(self, work: AttentionShape) -> tuple[int, int]:
        """Returns (p2p, 0). arXiv 2407.00611 counts k and v in P steps, although they are sent in P - 1 of these."""
        return work.layout.length * (work.k + work.v) * work.e, 0


def ring_forward_steps(work: AttentionShape, rings: Sequence[RingTopology]) -> Steps:
    """Returns the steps of `Ring.forward` on all ranks of some rings."""
    return rotation_steps(work, rings, work.payload("k", "v"))


def ring_backward_steps(
    work: AttentionShape, backward: Backward, rings: Callable[[RotatingSide], Sequence[RingTopology]]
) -> Steps:
    """Returns the steps of `Ring.backward` on all ranks.

    Args:
        rings: returns the rings for the side that rotates.
    """
    side = backward_side(work, backward)
    if side == "queries":
        return pass_queries_backward_steps(work, rings(side), ring_reduce_sends)
    return rotation_steps(work, rings(side), work.payload("k", "v"), work.payload("dk", "dv"), ring_reduce_sends)


def backward_side(work: AttentionShape, backward: Backward) -> RotatingSide:
    """Returns the side that rotates in backward."""
    queries = (work.layout.length, len(work.key_heads), work.head_dim)
    keys = (work.key_layout.length, work.kv_heads, work.value_dim)
    return cheaper_side(backward, queries, keys, work.dtype, work.grid)


def ring_backward_memory(x: Sizes, ranks: int, backward: Backward, onward: float = 0.5) -> float:
    """Peak of `Ring.backward` in a layout that is as even by keys as by queries, as zigzag is under a causal mask.

    Args:
        onward: as in `rotate_keys_backward`; not used if queries rotate.
    """
    if rotates_queries(x, backward):
        return rotate_queries_backward(x, ranks, direct=False)
    return rotate_keys_backward(x, ranks, onward)


def rotates_queries(x: Sizes, backward: Backward) -> bool:
    """Returns True if queries rotate in backward: `cheaper_side` for the sizes of a rank, in an even layout."""
    query_bytes, key_bytes = x.rotating + x.w * x.q, 2 * x.k * (1 + x.w)
    return backward == "queries" or (backward == "auto" and query_bytes < key_bytes)
