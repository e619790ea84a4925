"""A new method as its author would write it: a class, an optional plan, and a line of the registry.

Every rank gathers all queries and attends with its own keys; partial results are merged on the ranks that own the
queries. All-gather of keys and values with the sides exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionShape, AttentionSpec, CommPlan, Method, Saved
from armillary.attention.plans import (
    SequencePlan,
    Sizes,
    Step,
    all_gather,
    kernel_backward,
    kernel_forward,
    reduce_scatter,
    steps,
)
from armillary.attention.tiling.accumulators import Merge, Sum
from armillary.attention.tiling.block_attention import BlockAttention
from armillary.core import Axis, start_all_gather, start_merge_scatter, start_reduce_scatter


class GatheredQueries(Method):
    """All-gather of queries over one mesh axis of P ranks.

    Bytes sent: forward (P - 1) (B T H D e) all-gather and (P - 1) B T H (D e + a) reduce-scatter; backward
    (P - 1) B T H (3 D e + a) and (P - 1) B T H D a.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = Axis.of(axis)
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        (all_q,) = self._gather([q], spec)
        accumulator = Merge.of(all_q, v.shape[3])
        self._block(spec).forward(all_q, k, v, accumulator)
        partial_result = accumulator.result()
        del all_q, accumulator
        out, lse = start_merge_scatter(*partial_result, self.axis, spec.layout.sizes).wait()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        q, out, dout, lse = self._gather([saved.q, saved.out, dout, saved.lse], spec)
        dq, dk, dv = (Sum.like(x) for x in (q, saved.k, saved.v))
        self._block(spec).backward(dout, q, saved.k, saved.v, out, lse, dq, dk, dv)
        del q, out, dout, lse
        return start_reduce_scatter(dq.value(), self.axis, spec.layout.sizes).wait(), dk.result(), dv.result()

    def _gather(self, tensors: Sequence[Tensor], spec: AttentionSpec) -> list[Tensor]:
        """Returns the tensors of all ranks, in the order of the shards."""
        return [transfer.wait() for transfer in [start_all_gather(x, self.axis, spec.layout.sizes) for x in tensors]]

    def _block(self, spec: AttentionSpec) -> BlockAttention:
        """Returns the block of all queries, seen as one shard, and this rank's keys."""
        gathered = spec.cached("gathered", lambda: replace(spec, layout=spec.layout.coarsen(self.axis.size)))
        return gathered.block(0, self.axis.rank)


@dataclass(frozen=True)
class GatheredQueriesPlan(SequencePlan):
    """Plan of `GatheredQueries`: optional, for the planner and the bytes report."""

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        ranks, tokens = range(work.layout.shards), work.layout.sizes

        def gather(*tensors: str) -> Step:
            return Step(tuple(all_gather([ranks], tokens, work.payload(name)) for name in tensors))

        def scatter(*tensors: str) -> Step:
            return Step(tuple(reduce_scatter([ranks], tokens, work.payload(name)) for name in tensors))

        heads = len(work.key_heads)
        pairs = tuple(heads * sum(work.grid.pairs(r, s, work.batch) for r in ranks) for s in ranks)
        attend = Step(pairs=pairs, blocks=tuple((0, s) for s in ranks))
        return CommPlan(
            steps(gather("q"), attend, scatter("out", "lse")),
            steps(gather("q", "out", "dout", "lse"), attend, scatter("dq")),
            query_shards=(tuple(ranks),),
        )

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """All queries, their out and lse merged in float32, and a copy of the other ranks' results."""
        if ranks == 1:
            return kernel_forward(x)
        merged, part = x.w * x.q + x.lse, kernel_forward(x) + x.w * x.q + 3 * x.lse
        return ranks * (x.q + merged) + (ranks - 1) * part

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """All q, out, dout and lse, dq in float32; and the kernel on other ranks' queries, or dk and dv in float32."""
        if ranks == 1:
            return kernel_backward(x)
        kernel = kernel_backward(x, queries=ranks - 1, keys=0.5) + 2 * x.k
        widening = (ranks - 1) * x.q + (2 + 2 * x.w) * x.k
        return ranks * (x.rotating + x.w * x.q) + max(kernel, widening)
