"""TokenRing (arXiv 2412.20501): queries go round one way, partial results come straight back the other way.

    step          0    1    2    3
    rank 0 holds  q0   q3   q2   q1        each step: send the queries in hand to rank r + 1, compute with them,
    rank 1 holds  q1   q0   q3   q2        and return the partial (out, lse) of the step before to its owner
    rank 2 holds  q2   q1   q0   q3
    rank 3 holds  q3   q2   q1   q0

Both directions of each link are busy. The paper is about inference; here backward passes queries on too, with their
dout, out and lse, and shares of dq return straight to their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.comm_plan import AttentionShape, CommPlan, Steps
from armillary.attention.memory import Sizes, kernel_forward, rotate_queries_backward
from armillary.attention.methods.base import Method
from armillary.attention.methods.entry import OnSequence, RingWalk
from armillary.attention.rotation.returns import DirectReduce, Returns, Shares
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.steps import Returning, rotation_steps
from armillary.attention.rotation.topology import RingTopology
from armillary.attention.tiling.merge import Merge, Sum
from armillary.core import Axis
from armillary.core.token_ranges import TokenRanges


class TokenRing(Method):
    """TokenRing over one mesh axis of P ranks. Wins where K = H and links carry both directions at once.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is made for what returns, so every rank of the
            axis must construct the method; construct it once and share it between layers.

    Bytes sent, for e bytes an element and a an accumulated gradient element, all p2p: forward (P - 1) B T H D e one way
    and (P - 1) B T H (D e + a) the other; backward (P - 1) B T H (3 D e + a) and (P - 1) B T H D a. Less under
    a mask: a token goes no further than to the last rank that sees it.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = Axis.of(axis)
        self.return_axis = self.axis.duplicate()
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        ring, merged = self.ring(spec), Merge.of(q, v)

        def merge(tokens: TokenRanges, share: Shares) -> None:
            merged.add_tokens(tokens, *share)

        returns = DirectReduce(ring, merge)
        for hand in ring.rotate(q):  # the next queries are under way meanwhile
            (tokens, packed), share = returns.wanted(hand.step), ()
            if tokens.runs:
                (queries,) = hand.part(packed)
                into = Merge.of(queries, v) if hand.step else merged
                spec.block(hand.query, hand.key, queries=tokens).forward(queries, k, v, into)
                share = into.result()
                del queries, into
            returns.push(hand.step, share)  # straight to the owner of these queries
        returns.finish()
        out, lse = merged.result()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        return pass_queries_backward(dout, saved, spec, self.ring(spec), DirectReduce)

    def ring(self, spec: AttentionSpec) -> Rotation:
        """All ranks of the axis, each with its own shard."""
        axes = self.axis, self.return_axis
        return spec.once(("queries", id(self.axis)), lambda: Rotation.of_all(*axes, "queries", spec.grid))


def pass_queries_backward(
    dout: Tensor, saved: Saved, spec: AttentionSpec, ring: Rotation, returning: Callable[[Rotation], Returns]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of this rank's own queries, dk and dv of keys that stay), in the accumulation dtype.

    Args:
        returning: how shares of dq return: straight to their owners, or as a sum that follows its queries.

    Bytes sent: B H ((D + 2 Dv) e + a) for each token and hop, and B H D a for each token and hop, or if they return
    straight for each token and rank whose keys it sees any of.
    """
    dk, dv, returns = Sum.like(saved.k), Sum.like(saved.v), returning(ring)
    for hand in ring.rotate(saved.q, saved.out, dout, saved.lse):
        (tokens, packed), share = returns.wanted(hand.step), ()
        if tokens.runs:
            q, out, dout_, lse = hand.part(packed)
            dq = Sum.like(q)
            block = spec.block(hand.query, hand.key, queries=tokens)
            block.backward(dout_, q, saved.k, saved.v, out, lse, dq, dk, dv)
            share = (dq.value(),)
            del q, out, dout_, lse, dq
        returns.push(hand.step, share)
    return returns.finish()[0], dk.value(), dv.value()


# -- what is sent and computed ----------------------------------------------------------------------------------------


def comm_plan(work: AttentionShape) -> CommPlan:
    """What `TokenRing` sends and computes over the shards of `work`."""
    rings = [RingTopology.of_all(work.layout.shards, "queries")]
    results = work.out * work.e + work.lse * work.a
    forward = rotation_steps(work, rings, work.q * work.e, results, DirectReduce.sends)
    return CommPlan(forward, pass_queries_backward_steps(work, rings, DirectReduce.sends))


def pass_queries_backward_steps(work: AttentionShape, rings: Sequence[RingTopology], returning: Returning) -> Steps:
    """What `pass_queries_backward` sends and computes on all ranks of some rings."""
    hop = (work.q + 2 * work.out) * work.e + work.lse * work.a
    return rotation_steps(work, rings, hop, work.q * work.a, returning)


# -- what is allocated ------------------------------------------------------------------------------------------------


def forward_memory(x: Sizes, ranks: int) -> float:
    """P ranks pass queries on, and partial results come straight back.

    The first to come back is merged at the third step, with queries in hand and coming: there are this rank's own
    partial result and its float32 copy, the third step's, and the one that came (half of the tokens) with its copy.
    """
    if ranks == 1:
        return kernel_forward(x)
    passing = x.q * min(ranks - 2, 2)
    return passing + 2.5 * kernel_forward(x) + 1.5 * x.w * x.q + x.lse


def backward_memory(x: Sizes, ranks: int) -> float:
    """P ranks pass queries on, and send shares of dq straight home."""
    return rotate_queries_backward(x, ranks, direct=True)


REGISTERED = OnSequence(
    build=lambda axis, _: TokenRing(axis),
    comm_plan=lambda work, _: comm_plan(work),
    forward_memory=lambda x, ranks, _: forward_memory(x, ranks),
    backward_memory=lambda x, ranks, _: backward_memory(x, ranks),
    walk=lambda layout, _: RingWalk.of_ring(layout, "queries"),
)
