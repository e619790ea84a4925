"""TokenRing (arXiv 2412.20501): queries rotate one way around the ring, partial results return the other way.

    step          0    1    2    3
    rank 0 has    q0   q3   q2   q1
    rank 1 has    q1   q0   q3   q2
    rank 2 has    q2   q1   q0   q3
    rank 3 has    q3   q2   q1   q0

At each step a rank computes with its current queries. Meanwhile it sends these queries to the next rank, and block_out
and block_lse of the previous step to the rank that owns the previous queries. The picture has the direction r to r + 1.
The ring turns the other way if that sends fewer tokens, as with zigzag and a causal mask.

Both directions of each link are busy. The paper covers inference only. In our backward queries rotate too, with their
dout, out and lse, and each rank sends its part of dq directly to the owner of the queries.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.methods.base import Method
from armillary.attention.rings.reduce import DirectReduce, Partials, Reduction
from armillary.attention.rings.rotate import RotatingShard, Rotation
from armillary.attention.rings.topology import RingTopology
from armillary.attention.tiling.accumulators import Merge, Sum
from armillary.attention.tiling.block_attention import RingBlock
from armillary.attention.tiling.latents import Expansion
from armillary.core import Axis, TokenRanges
from armillary.core.internal import Side


class TokenRing(Method):
    """TokenRing over one mesh axis of P ranks. Useful on links that send in both directions at once.

    With GQA, keys and values have fewer bytes than queries, so `Ring` sends less. TokenRing suits K = H.

    The full sequence is q [B, N, H, D], k [B, N_k, K, D], v [B, N_k, K, Dv] and out [B, N, H, Dv], sharded on dim 1; a
    rank has T queries and S keys of it. Any layout is exact; zigzag is balanced under a causal mask.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is created on it for the results that return,
            so every rank of the axis must construct the method. Construct it once and share it between layers.

    Bytes sent by a rank, for e bytes an element and a bytes an accumulated gradient element, all p2p, with Dv = D:
    forward (P - 1) B T H D e one way and (P - 1) B T H (D e + a) the other; backward (P - 1) B T H (3 D e + a) and
    (P - 1) B T H D a. Under a mask fewer, because a token travels no further than to the last rank that sees it.
    """

    fits_inside_ring = True  # can be the `inner` method of a `Ring`
    takes_latents = True  # from an outer ring
    sends_keys = False

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis: Axis = Axis.of(axis)
        self.return_axis: Axis = self.axis.duplicate()
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    @property
    def balanced_by(self) -> Side:
        """The side whose pairs a balanced layout makes even: keys, which stay while queries rotate."""
        return "keys"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        sent_k, sent_v = k, v
        if expansion is not None:
            k, v = expansion.expand(k, v)  # once, because keys stay
        ring, accumulator = self.rotation(spec), Merge.of(q, v.shape[3])

        # Merges the (block_out, block_lse) that another rank returns into the (out, lse) of this rank's own queries.
        def merge(tokens: TokenRanges, partial_result: Partials) -> None:
            accumulator.add_tokens(tokens, *partial_result)

        returns = DirectReduce(ring, merge)
        for current in ring.rotate(q):  # sends the current queries while their block is computed
            # Received tensors are packed: they have only tokens that this rank or a later one needs. `tokens` are the
            # indices in the full shard of the queries that see a key here; `packed_tokens` are theirs in the tensors.
            tokens, packed_tokens = returns.result_tokens(current.step)
            (queries,) = current.take(packed_tokens)
            # At step 0 the queries are this rank's own, so their partial result is merged directly.
            block_result = Merge.of(queries, v.shape[3]) if current.step else accumulator
            block = spec.block(current.query_shard, current.key_shard, queries=tokens)
            block.forward(queries, k, v, block_result)
            partial_result = block_result.result()  # block_out, block_lse
            del queries, block_result
            # Sent against the direction of the queries, in flight while the next block is computed. At step 0 nothing
            # is sent: `push` only prepares the receive buffers.
            returns.push(current.step, partial_result)
            del partial_result  # frees it before the next block is computed
        returns.finish()  # waits for the last partial result: no computation is left to overlap it
        out, lse = accumulator.result()
        return out, Saved(q, sent_k, sent_v, out, lse)

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        def block(current: RotatingShard, tokens: TokenRanges) -> RingBlock:
            return spec.block(current.query_shard, current.key_shard, queries=tokens)

        return pass_queries_backward(dout, saved, self.rotation(spec), DirectReduce, block, expansion)

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Computes the tiles and sends of calls with `spec` on `rows` rows of the batch, before they run."""
        ring = self.rotation(spec)
        # A direct step has the queries of a step whose results return directly to their owner.
        for step, direct_step in zip(ring.steps, ring.direct_steps, strict=True):
            spec.plan_block(rows, step.query_shard, step.key_shard, queries=direct_step.visible_tokens)

    def rotation(self, spec: AttentionSpec) -> Rotation:
        """Returns the rotation around all ranks of the axis, each with its own shard. Cached per spec."""

        def make() -> Rotation:
            ring = RingTopology.of_all(self.axis.size, "queries")
            return Rotation.of(self.axis, self.return_axis, ring, spec.grid)

        return spec.cached(("queries", id(self.axis)), make)


def pass_queries_backward(
    dout: Tensor,
    saved: Saved,
    ring: Rotation,
    reduction: Callable[[Rotation], Reduction],
    block: Callable[[RotatingShard, TokenRanges], RingBlock],
    expansion: Expansion | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs backward with q, out, dout and lse rotating; k, v, dk and dv stay.

    Args:
        dout: [B, T, H, Dv], of this rank's own queries.
        reduction: constructor of the `Reduction` of dq. `DirectReduce` sends each rank's part to the owner of the
            queries; `RingReduce` sends one sum along with the queries.
        block: function of (current shard, tokens of that shard), which returns the attention of these tokens' queries
            over this rank's keys.

    Returns:
        dq [B, T, H, D] of this rank's own queries, dk [B, S, K, D] and dv [B, S, K, Dv] of its keys, in the
        accumulation dtype.

    Bytes sent, p2p: B H ((D + 2 Dv) e + a) for each hop of a query. For dq, B H D a for each hop of a sum
    (`RingReduce`), or for each other rank with keys that the query sees (`DirectReduce`).
    """
    k, v = (saved.k, saved.v) if expansion is None else expansion.expand(saved.k, saved.v)
    dk, dv, returns = Sum.like(k), Sum.like(v), reduction(ring)  # dk and dv stay with their keys
    for current in ring.rotate(saved.q, saved.out, dout, saved.lse):  # sends them while their block is computed
        tokens, packed_tokens = returns.result_tokens(current.step)
        q, out, block_dout, lse = current.take(packed_tokens)
        dq = Sum.like(q)  # the part of dq that this rank's keys contribute
        block(current, tokens).backward(block_dout, q, k, v, out, lse, dq, dk, dv)
        del q, out, block_dout, lse
        # dq returns to the owner of q while the next block is computed.
        returns.push(current.step, (dq.value(),))
        del dq  # frees it before the next block is computed
    dq = returns.finish()[0]
    if expansion is not None:
        return dq, *expansion.collapse(saved.v, dk.value(), dv.value())
    return dq, dk.value(), dv.value()
