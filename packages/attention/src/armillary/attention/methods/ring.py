"""Ring Attention (arXiv 2310.01889): keys and values go round, queries stay.

    step          0    1    2    3
    rank 0 holds  k0   k3   k2   k1
    rank 1 holds  k1   k0   k3   k2        each step: send what is in hand to rank r + 1, compute with it meanwhile
    rank 2 holds  k2   k1   k0   k3
    rank 3 holds  k3   k2   k1   k0

With the zigzag layout every block of a causal mask costs the same, so that all ranks finish each step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.comm_plan import AttentionShape, CommPlan, Steps
from armillary.attention.memory import Sizes, rotate_keys_backward, rotate_keys_forward, rotate_queries_backward
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import Backward, OnSequence, RingWalk
from armillary.attention.methods.token_ring import pass_queries_backward, pass_queries_backward_steps
from armillary.attention.rotation.returns import RingReduce
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.steps import rotation_steps
from armillary.attention.rotation.topology import Moving, RingTopology
from armillary.attention.tiling.merge import Merge, Sum
from armillary.core import Axis
from armillary.core.checked import one_of


class Ring(Method):
    """Ring Attention over one mesh axis of P ranks.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is made for it, so every rank of the axis must
            construct the method; construct it once and share it between layers.
        backward: what goes round in backward: keys and values with their gradients, or queries with theirs. "auto"
            takes what sends fewer bytes: queries for multi-head attention in 16 bits, keys for most else.

    Bytes sent, for e bytes an element and a an accumulated gradient element, all p2p: forward (P - 1) 2 B T K D e;
    backward (P - 1) 2 B T K D (e + a), or with queries (P - 1) B T H (3 D e + a + D a). Less under a
    mask: a token goes no further than to the last rank that sees it.
    """

    def __init__(self, axis: DeviceMesh | Axis, backward: Backward = "auto") -> None:
        self.axis = Axis.of(axis)
        self.backward_moves: Backward = check_backward(backward)
        self.return_axis = self.axis.duplicate()
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        ring, merged = self.ring("keys", spec), Merge.of(q, v)
        for hand in ring.rotate(k, v):  # the next keys and values are under way meanwhile
            if hand.tensors:
                block = spec.block(hand.query, hand.key, keys=hand.held)
                block.forward(q, hand.tensors[0], hand.tensors[1], merged)
        out, lse = merged.result()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        if fewer_bytes(self.backward_moves, AttentionShape.of_saved(saved, spec)) == "queries":
            return pass_queries_backward(dout, saved, spec, self.ring("queries", spec), RingReduce)
        ring, dq = self.ring("keys", spec), Sum.like(saved.q)
        sums = RingReduce(ring)
        for hand in ring.rotate(saved.k, saved.v):
            shares = [Sum.like(x) for x in hand.tensors]
            if hand.tensors:
                here = saved._replace(k=hand.tensors[0], v=hand.tensors[1])
                block = spec.block(hand.query, hand.key, keys=hand.held)
                block.backward(dout, *here, dq, shares[0], shares[1])
                del here
            sums.push(hand.step, [share.result() for share in shares])  # they follow their keys, one step behind
        dk, dv = sums.finish()
        return dq.value(), dk, dv

    def ring(self, moving: Moving, spec: AttentionSpec) -> Rotation:
        """All ranks of the axis, each with its own shard."""
        axes = self.axis, self.return_axis
        return spec.once((moving, id(self.axis)), lambda: Rotation.of_all(*axes, moving, spec.grid))


def check_backward(backward: Backward) -> Backward:
    """Refuses anything but the three choices."""
    return cast(Backward, one_of("backward", backward, get_args(Backward)))


def fewer_bytes(choice: Backward, work: AttentionShape) -> Moving:
    """What to send round in backward: as asked for, or by bytes of a whole shard, so that all ranks agree."""
    if choice != "auto":
        return choice
    keys = work.key_layout.length * (work.k + work.v) * (work.e + work.a)
    queries = work.layout.length * ((work.q + 2 * work.out) * work.e + (work.lse + work.q) * work.a)
    return "queries" if queries < keys else "keys"


# -- what is sent and computed ----------------------------------------------------------------------------------------


def comm_plan(work: AttentionShape, backward: Backward = "auto") -> CommPlan:
    """What `Ring` sends and computes over the shards of `work`."""

    def rings(moving: Moving) -> list[RingTopology]:
        return [RingTopology.of_all(work.layout.shards, moving)]

    return CommPlan(forward_steps(work, rings("keys")), backward_steps(work, check_backward(backward), rings))


def forward_steps(work: AttentionShape, rings: Sequence[RingTopology]) -> Steps:
    """What `Ring.forward` sends and computes on all ranks of some rings."""
    return rotation_steps(work, rings, (work.k + work.v) * work.e)


def backward_steps(
    work: AttentionShape, backward: Backward, rings: Callable[[Moving], Sequence[RingTopology]]
) -> Steps:
    """What `Ring.backward` does, the cheaper one or the one that is asked for, round the rings that it takes."""
    moving = fewer_bytes(backward, work)
    if moving == "queries":
        return pass_queries_backward_steps(work, rings(moving), RingReduce.sends)
    keys = work.k + work.v
    return rotation_steps(work, rings(moving), keys * work.e, keys * work.a, RingReduce.sends)


def published_bytes(work: AttentionShape) -> tuple[int, int]:
    """As arXiv 2407.00611 counts it: P steps of k and v, where one less is sent."""
    return work.layout.length * (work.k + work.v) * work.e, 0


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes, ranks: int) -> float:
    """P ranks pass keys on."""
    return rotate_keys_forward(x, ranks)


def backward_memory(x: Sizes, ranks: int, backward: Backward = "auto", onward: float = 0.5) -> float:
    """P ranks pass keys on, or queries: as `fewer_bytes` has it. `onward` as of `rotate_keys_backward`."""
    queries, keys = x.rotating + x.w * x.q, 2 * x.k * (1 + x.w)
    if backward == "queries" or (backward == "auto" and queries < keys):
        return rotate_queries_backward(x, ranks, direct=False)
    return rotate_keys_backward(x, ranks, onward)


REGISTERED = OnSequence(
    build=lambda axis, options: Ring(axis, options.backward),
    comm_plan=lambda work, options: comm_plan(work, options.backward),
    forward_memory=lambda x, ranks, _: forward_memory(x, ranks),
    backward_memory=lambda x, ranks, options: backward_memory(x, ranks, options.backward),
    walk=lambda layout, _: RingWalk.of_ring(layout, "keys"),
    published=lambda work, _: published_bytes(work),
    takes=("backward",),
)
