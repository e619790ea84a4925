"""Plan of `AllGatherKV`."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.attention.planning.base import SequencePlan
from armillary.attention.planning.comm_plan import (
    AttentionShape,
    CommPlan,
    Step,
    all_gather,
    reduce_scatter,
    steps,
)
from armillary.attention.planning.memory import Sizes, kernel_backward, kernel_forward


@dataclass(frozen=True)
class AllGatherPlan(SequencePlan):
    """Plan of `AllGatherKV`."""

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        ranks, tokens = range(work.layout.shards), work.key_layout.sizes
        gather = Step(tuple(all_gather([ranks], tokens, work.payload(name)) for name in ("k", "v")))
        scatter = Step(tuple(reduce_scatter([ranks], tokens, work.payload(name)) for name in ("dk", "dv")))
        heads = len(work.key_heads)
        pairs = tuple(heads * sum(work.grid.pairs(r, s, work.batch) for s in ranks) for r in ranks)
        attend = Step(pairs=pairs, blocks=tuple((r, 0) for r in ranks))
        return CommPlan(steps(gather, attend), steps(gather, attend, scatter), key_shards=(tuple(ranks),))

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """All k and v; own queries against a causal square, then half of them against all other keys."""
        if ranks == 1:
            return kernel_forward(x)
        # Two tiles: the causal square of own keys, then half of the queries against all other keys (zigzag).
        merge_bytes, block = x.w * x.q + x.lse, kernel_forward(x, 0.5)
        return 2 * ranks * x.k + merge_bytes + block + max(x.q, x.w * x.q / 2 + 2 * x.lse)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """All k and v, and all dk and dv in float32, which are then sent to their owners and summed."""
        if ranks == 1:
            return kernel_backward(x)
        all_keys = 2 * ranks * x.k
        block = kernel_backward(x, queries=0.5, keys=ranks - 1)
        scatter_bytes = x.w * x.q + x.w * all_keys + 2 * x.w * x.k
        return x.w * all_keys + max(all_keys + x.q + block, scatter_bytes)
