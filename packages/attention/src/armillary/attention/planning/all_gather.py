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
        """Peak of the second of two tiles: a causal square of own keys, then half of the queries against other keys."""
        if ranks == 1:
            return kernel_forward(x)
        all_keys = 2 * ranks * x.k  # k and v of all ranks
        # The float32 sum of out, lse, and the second tile's out and lse for half of the queries. Beside them either
        # the first tile's out, while it becomes float32, or the second's in float32 and a weight for each query in it.
        merge_bytes, block = x.w * x.q + x.lse, kernel_forward(x, 0.5)
        return all_keys + merge_bytes + block + max(x.q, (x.w * x.q + x.lse) / 2)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of the second tile's kernel, or of the reduce-scatter of dk and dv."""
        if ranks == 1:
            return kernel_backward(x)
        all_keys = 2 * ranks * x.k  # k and v of all ranks
        all_sums = x.w * all_keys  # dk and dv of all ranks, in float32
        # The second tile: all k and v, dq of the first tile, and the kernel on half of the queries.
        kernel_bytes = all_keys + x.q + kernel_backward(x, queries=0.5, keys=ranks - 1)
        # The reduce-scatter: dq in float32, the received dk and dv of all ranks, and their sums for own keys.
        scatter_bytes = x.w * x.q + all_sums + 2 * x.w * x.k
        return all_sums + max(kernel_bytes, scatter_bytes)
