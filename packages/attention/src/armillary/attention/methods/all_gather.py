"""All-gather of keys and values: what LLaMA-3 was trained with (arXiv 2407.21783, section 3.3.2).

Every rank gathers all keys and values and attends with its own queries. Simple, and frugal where there are few
key/value heads; but each rank holds the whole sequence of keys, and computes nothing until they are there.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.comm_plan import AttentionShape, CommPlan, Step, all_gather, reduce_scatter, steps
from armillary.attention.memory import Sizes, kernel_backward, kernel_forward
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import OnSequence, RingWalk
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.block import BlockAttention
from armillary.attention.tiling.merge import Merge, Sum
from armillary.core import Axis, SequenceLayout
from armillary.core.collectives.all_gather import start_all_gather
from armillary.core.collectives.reduce_scatter import start_reduce_scatter


class AllGatherKV(Method):
    """All-gather of keys and values over one mesh axis of P ranks.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`.

    Bytes sent, for e bytes an element and a an accumulated gradient element: forward (P - 1) 2 B S K D e, all-gather;
    backward as much again, as they are not kept, and (P - 1) 2 B S K D a, reduce-scatter. Where shards are of unequal
    size, each is gathered as the largest, and gradients are sent for the keys of all other shards.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = Axis.of(axis)
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        merged = Merge.of(q, v)
        k_all, v_all = self._gather(k, v, spec)
        self._block(spec).forward(q, k_all, v_all, merged)
        out, lse = merged.result()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        k_all, v_all = self._gather(saved.k, saved.v, spec)
        whole = saved._replace(k=k_all, v=v_all)
        dq, dk, dv = (Sum.like(x) for x in (whole.q, whole.k, whole.v))
        self._block(spec).backward(dout, *whole, dq, dk, dv)
        del k_all, v_all, whole  # gradients go home in their place
        moving = [start_reduce_scatter(x.value(), self.axis, spec.key_layout.sizes) for x in (dk, dv)]
        dk, dv = (move.wait() for move in moving)
        return dq.result(), dk, dv

    def _gather(self, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """All keys and values, [B, N, K, D] in the order of the shards."""
        moving = [start_all_gather(x, self.axis, spec.key_layout.sizes) for x in (k, v)]
        k, v = (move.wait() for move in moving)
        return k, v

    def _block(self, spec: AttentionSpec) -> BlockAttention:
        """This rank's queries against all keys, taken as one shard."""
        together = spec.once("together", lambda: replace(spec, key_layout=spec.key_layout.coarsen(self.axis.size)))
        return together.block(self.axis.rank, 0)


def comm_plan(work: AttentionShape) -> CommPlan:
    """What `AllGatherKV` sends and computes over the shards of `work`."""
    every, tokens = range(work.layout.shards), work.key_layout.sizes
    gather = Step(tuple(all_gather([every], tokens, x * work.e) for x in (work.k, work.v)))
    scatter = Step(tuple(reduce_scatter([every], tokens, x * work.a) for x in (work.k, work.v)))
    heads = len(work.key_heads)
    attend = Step(pairs=tuple(heads * sum(work.grid.pairs(r, s, work.batch) for s in every) for r in every))
    return CommPlan(steps(gather, attend), steps(gather, attend, scatter))


def walk(layout: SequenceLayout) -> RingWalk:
    """Each rank's queries against all keys, at once."""
    together = SequenceLayout.contiguous(layout.length, 1)
    return RingWalk(layout, together, [RingTopology((rank,), (rank,), (0,), "keys") for rank in range(layout.shards)])


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes, ranks: int) -> float:
    """k and v of all P ranks; own queries against a causal square, then half of them against all other keys."""
    if ranks == 1:
        return kernel_forward(x)
    merged, part = x.w * x.q + x.lse, kernel_forward(x, 0.5)
    return 2 * ranks * x.k + merged + part + max(x.q, x.w * x.q / 2 + 2 * x.lse)


def backward_memory(x: Sizes, ranks: int) -> float:
    """k and v of all P ranks, and dk and dv of as many in float32, which are then sent to their owners and summed."""
    if ranks == 1:
        return kernel_backward(x)
    every = 2 * ranks * x.k
    others = kernel_backward(x, queries=0.5, keys=ranks - 1)
    scattering = x.w * x.q + x.w * every + 2 * x.w * x.k
    return x.w * every + max(every + x.q + others, scattering)


REGISTERED = OnSequence(
    build=lambda axis, _: AllGatherKV(axis),
    comm_plan=lambda work, _: comm_plan(work),
    forward_memory=lambda x, ranks, _: forward_memory(x, ranks),
    backward_memory=lambda x, ranks, _: backward_memory(x, ranks),
    walk=lambda layout, _: walk(layout),
)
