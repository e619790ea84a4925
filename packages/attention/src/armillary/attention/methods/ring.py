"""Ring Attention (arXiv 2310.01889): keys and values rotate around the ring; queries stay.

    step          0    1    2    3
    rank 0 has    k0   k3   k2   k1
    rank 1 has    k1   k0   k3   k2
    rank 2 has    k2   k1   k0   k3
    rank 3 has    k3   k2   k1   k0

At each step a rank computes with its current shard, and meanwhile sends the shard to the next rank. The picture has the
direction r to r + 1. If fewer tokens are sent in the direction r to r - 1, as with zigzag and a causal mask, the ring
turns that way. With zigzag and a causal mask all blocks of a step cost the same, so all ranks finish it together.

With an inner method the ring connects nodes (`rings/node_rings.py`): device d of a node sends its keys to device d
of the next node. At each step the inner method computes attention over all keys that are in the node. With an inner
Ring this is LoongTrain's double ring (arXiv 2406.18485); with an inner TokenRing, TokenRing across nodes (arXiv
2412.20501, figure 5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionMethod, AttentionSpec, Saved
from armillary.attention.methods.base import Method, check_inner
from armillary.attention.methods.token_ring import pass_queries_backward
from armillary.attention.rings.node_rings import NodeRings
from armillary.attention.rings.reduce import RingReduce
from armillary.attention.rings.rotate import RotatingShard, Rotation
from armillary.attention.rings.topology import RingTopology, RotatingSide
from armillary.attention.tiling.accumulators import Merge, Sum
from armillary.attention.tiling.block_attention import RingBlock
from armillary.attention.tiling.grid import Grid
from armillary.attention.tiling.latents import Expansion, GatheredBlock, block_of, value_dim
from armillary.core import Axis, TokenRanges, accumulation_dtype
from armillary.core.internal import Side, check_choice

Backward = Literal["auto", "keys", "queries"]
MAX_IMBALANCE = 1.10
"""Backward "auto" rotates queries only if the most loaded rank then has at most this many times as many pairs as the
most loaded rank has if keys rotate."""


class Ring(Method):
    """Ring Attention over one mesh axis of P ranks; or, with an inner method for the devices of a node, over P nodes.

    The full sequence is q [B, N, H, D], k [B, N_k, K, D], v [B, N_k, K, Dv] and out [B, N, H, Dv], sharded on dim 1; a
    rank has T queries and S keys of it. Any layout is exact; zigzag is balanced under a causal mask.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is created on it, so every rank of the axis must
            construct the method. Construct it once and share it between layers.
        backward: the side that rotates in backward: "keys" (k and v, with dk and dv) or "queries" (q, out, dout and
            lse, with dq). "auto" takes the side that sends fewer bytes without a mask: for self-attention with Dv = D,
            queries if K = H in 16 bits, otherwise keys. It also takes keys if queries would make the work of ranks
            uneven.
        inner: Ring, TokenRing, AllGatherKV or Local over the m devices of a node, such as `TokenRing(mesh["devices"])`
            inside of `Ring(mesh["nodes"])`. Device d of node n has shard n m + d. None for a ring of single ranks.

    Bytes sent by a rank, for e bytes an element and a bytes an accumulated gradient element, all p2p, with Dv = D and
    shards of equal size:

        forward                    (P - 1) 2 B S K D e
        backward, keys rotate      (P - 1) 2 B S K D (e + a)
        backward, queries rotate   (P - 1) B T H (3 D e + a + D a)

    Under a mask fewer, because a token travels no further than to the last rank that sees it. The inner method sends
    its own bytes at each of the P steps.

    Raises:
        ValueError: `backward` is unknown; `inner` is not a method that fits inside of a ring, or its axis and this one
            do not form a grid of ranks.
    """

    fits_inside_ring = True

    def __init__(
        self, axis: DeviceMesh | Axis, backward: Backward = "auto", inner: AttentionMethod | None = None
    ) -> None:
        self.axis: Axis = Axis.of(axis)
        self.backward_side: Backward = check_backward(backward)
        self.inner = inner
        if inner is not None:
            check_inner(self.axis, inner, example="Ring(mesh['devices'])")
            if not inner.fits_inside_ring:
                raise ValueError(
                    f"inner={type(inner).__name__} does not fit inside of a Ring; Ring, TokenRing, AllGatherKV and "
                    "Local do. Put a method on the head axis around it: Ulysses(mesh['ulysses'], inner=Ring(...))"
                )
        self.return_axis: Axis = self.axis.duplicate()
        self.takes_latents = inner is None or inner.takes_latents
        devices, device = (1, 0) if inner is None else (inner.shards, inner.shard)
        self.shards = self.sequence_shards = self.axis.size * devices
        self.shard = self.axis.rank * devices + device

    @property
    def axes(self) -> tuple[Axis, ...]:
        # Outermost first: the axis of nodes is outside of the axis of devices.
        return self.axis, *(() if self.inner is None else self.inner.axes)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        ring, accumulator = self.rotation("keys", spec), Merge.of(q, value_dim(v, expansion))
        for current in ring.rotate(k, v):  # sends the current shard while its block is computed
            block = self.block("keys", current, current.token_ranges, spec, expansion)
            # Blockwise attention: the online softmax merges (out, lse) of this shard's keys into the accumulator.
            block.forward(q, current.tensors[0], current.tensors[1], accumulator)
        out, lse = accumulator.result()
        return out, Saved(q, k, v, out, lse)

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_sizes = (spec.layout.length, *dout.shape[2:], saved.q.shape[3])
        key_sizes = (spec.key_layout.length, sum(x.shape[2] * x.shape[3] for x in (saved.k, saved.v)))
        if cheaper_side(self.backward_side, query_sizes, key_sizes, saved.q.dtype, spec.grid) == "queries":

            def query_block(current: RotatingShard, tokens: TokenRanges) -> RingBlock:
                return self.block("queries", current, tokens, spec)

            ring = self.rotation("queries", spec)
            return pass_queries_backward(dout, saved, ring, RingReduce, query_block, expansion)
        ring, dq = self.rotation("keys", spec), Sum.like(saved.q)  # dq stays with its queries
        sums = RingReduce(ring)  # dk and dv travel with their keys
        for current in ring.rotate(saved.k, saved.v):
            key_grads = [Sum.like(x) for x in current.tensors]
            # Probabilities are exp(score - lse), with the lse over all keys. So a block computes exactly its part of
            # dq, dk and dv, and the parts are summed.
            current_saved = saved._replace(k=current.tensors[0], v=current.tensors[1])
            block = self.block("keys", current, current.token_ranges, spec, expansion)
            block.backward(dout, *current_saved, dq, key_grads[0], key_grads[1])
            del current_saved  # so that `rotate` can free the shard when its step ends
            # dk and dv are sent one step after their keys, so that the send overlaps with the next block.
            sums.push(current.step, [grad.result() for grad in key_grads])
        dk, dv = sums.finish()
        return dq.value(), dk, dv

    def gathering(self, devices: Axis) -> GatheringRing | None:
        """Returns the ring that rotates latents which the ranks of `devices` share; None with an inner method."""
        rotates_queries = self.backward_side == "queries" or self.inner is not None
        return None if rotates_queries else GatheringRing(self, devices)

    @property
    def balanced_by(self) -> Side | None:
        """The side whose pairs a balanced layout makes even: the one that stays, so both if queries rotate in backward.

        None with an inner method: both sides are made even, and bytes are ignored.
        """
        if self.inner is not None:
            return None
        return "both" if self.backward_side == "queries" else "queries"

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Computes the tiles and sends of calls with `spec` before they run. With an inner method it computes nothing.

        Args:
            previous: the spec of an earlier call.
            rows: number of rows of the batch.
        """
        if self.inner is not None:
            return
        for side in get_args(RotatingSide):
            if previous.has((side, id(self.axis))):  # only the sides that the earlier call rotated
                for step in self.rotation(side, spec).steps:
                    queries, keys = (None, step.token_ranges) if side == "keys" else (step.token_ranges, None)
                    spec.plan_block(rows, step.query_shard, step.key_shard, queries, keys)

    def rotation(self, side: RotatingSide, spec: AttentionSpec) -> Rotation:
        """Returns the rotation around this rank's ring, in the direction that sends fewer tokens. Cached per spec."""
        return spec.cached(
            (side, id(self.axis)), lambda: Rotation.of(self.axis, self.return_axis, *self.topology(side, spec))
        )

    def topology(self, side: RotatingSide, spec: AttentionSpec) -> tuple[RingTopology, Grid]:
        """Returns this rank's ring, and the visible pairs of its shards: all ranks of the axis, each with its shard."""
        if self.inner is None:
            return RingTopology.of_all(self.axis.size, side), spec.grid
        rings = self.node_rings(self.inner, side, spec)
        return rings.rings[self.inner.shard], rings.grid

    def block(
        self,
        side: RotatingSide,
        current: RotatingShard,
        tokens: TokenRanges,
        spec: AttentionSpec,
        expansion: Expansion | None = None,
    ) -> RingBlock:
        """Returns the attention of a step: of this rank alone, or of all devices of the node by the inner method.

        Args:
            side: the side that rotates.
            tokens: the tokens of the rotating shard that the tensors of the block contain, packed. Ignored with an
                inner method, whose layouts have only these tokens.
        """
        inner = self.inner
        if inner is None:
            queries, keys = (None, tokens) if side == "keys" else (tokens, None)
            return block_of(spec.block(current.query_shard, current.key_shard, queries, keys), expansion)

        rings, node, step = self.node_rings(inner, side, spec), self.axis.rank, current.step
        attention = spec.cached(("node", side, step, id(self)), lambda: rings.attention(inner, node, step, spec))
        return attention if expansion is None else attention._replace(expansion=expansion)

    def node_rings(self, inner: AttentionMethod, side: RotatingSide, spec: AttentionSpec) -> NodeRings:
        """Returns the rings of all devices. Cached per spec."""
        return spec.cached(("nodes", side, inner.shards), lambda: NodeRings.of(inner.shards, side, spec.grid))


class GatheringRing(Ring):
    """A ring whose ranks each have some of the latents of a node, and gather them within the node at each step.

    For methods on the head axis, whose U ranks attend with other heads, but with the same latents. If each gathered
    these first and then rotated them, they would travel between nodes U times.

    Args:
        ring: the ring between nodes, whose communicators are used.
        devices: the axis of U ranks of a node. Rank d has shard n U + d of the keys of node n.
    """

    def __init__(self, ring: Ring, devices: Axis) -> None:
        self.axis, self.return_axis, self.inner, self.backward_side = ring.axis, ring.return_axis, None, "keys"
        self.shards, self.sequence_shards, self.shard = ring.shards, ring.sequence_shards, ring.shard
        self.takes_latents, self.devices = True, devices

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        """Returns out of the queries [B, U T, h, D] of a node, and the saved tensors: k and v of this rank alone.

        Args:
            spec: the spec of `ring`.
        """
        return super().forward(q, k, v, self.gathering_spec(spec), expansion)

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().backward(dout, saved, self.gathering_spec(spec), expansion)

    def gathering_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec whose key shards are those of single ranks. Cached per spec."""
        count = self.devices.size
        return spec.cached(("by device", count), lambda: replace(spec, key_layout=spec.key_layout.refine(count)))

    def topology(self, side: RotatingSide, spec: AttentionSpec) -> tuple[RingTopology, Grid]:
        return self._rings(spec).rings[self.devices.rank], spec.grid

    def block(
        self,
        side: RotatingSide,
        current: RotatingShard,
        tokens: TokenRanges,
        spec: AttentionSpec,
        expansion: Expansion | None = None,
    ) -> RingBlock:
        gathered = self.gathered_block(current.step, spec, expansion)
        return gathered or spec.block(current.query_shard, current.key_shard, keys=tokens)

    def gathered_block(
        self, step: int, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> GatheredBlock | None:
        """Returns the attention of a step over the latents of a node; None if no query of the node sees one."""
        node_step = spec.cached(("step", step), lambda: self._rings(spec).step(self.axis.rank, step))
        if node_step is None:
            return None
        key_layout = node_step.key_layout
        node_spec = spec.cached(("node", step), lambda: replace(spec, key_layout=key_layout.coarsen(self.devices.size)))
        return GatheredBlock(block_of(node_spec.block(self.axis.rank, 0), expansion), self.devices, key_layout.sizes)

    def _rings(self, spec: AttentionSpec) -> NodeRings:
        layouts = spec.layout.refine(self.devices.size), spec.key_layout
        rings = self.axis.size, self.devices.size, "keys", *layouts, spec.grid
        return spec.cached("rings", lambda: NodeRings(*rings))


def check_backward(backward: Backward) -> Backward:
    """Returns `backward`. Raises ValueError for an unknown side."""
    return cast(Backward, check_choice("backward", backward, get_args(Backward)))


def cheaper_side(
    backward: Backward,
    query_sizes: tuple[int, ...],
    key_sizes: tuple[int, int],
    dtype: torch.dtype,
    grid: Grid,
) -> RotatingSide:
    """Returns the side that rotates in backward: `backward`, or for "auto" the one that sends fewer bytes.

    Compares bytes of full sequences, not of this rank's shard, so that every rank chooses alike. "auto" does not rotate
    queries if that would give the most loaded rank much more work, because all other ranks would wait for it.

    Args:
        query_sizes: (N, H, Dv, D), of out and q.
        key_sizes: N_k, and the numbers of a token's k and v: K (D + Dv), or Dr + L of latents.
    """
    if backward != "auto":
        return backward
    (length, heads, value_dim, dim), (key_length, key_numbers) = query_sizes, key_sizes
    e, a = dtype.itemsize, accumulation_dtype(dtype).itemsize  # bytes of an element, and of an accumulated one
    # Bytes of one hop of all shards. The batch is a factor of both sides, and left out.
    key_bytes = key_length * key_numbers * (e + a)  # k and v as e, dk and dv as a
    query_bytes = length * heads * ((dim + 2 * value_dim) * e + a + dim * a)  # q, out and dout as e, lse and dq as a
    return "queries" if query_bytes < key_bytes and _stays_balanced(grid) else "keys"


def _stays_balanced(grid: Grid) -> bool:
    """Returns True if the most loaded rank has at most `MAX_IMBALANCE` times as many pairs when queries rotate."""

    def most_pairs() -> tuple[int, int]:
        """Returns the pairs of the most loaded rank if keys rotate, and if queries rotate."""
        # If keys rotate, a rank computes all pairs of its query shard, the sum over a row of the grid; if queries
        # rotate, all pairs of its key shard, the sum over a column.
        query_shards, key_shards = range(grid.layout.shards), range(grid.key_layout.shards)
        pairs = [[grid.pairs(query, key, batch=1) for key in key_shards] for query in query_shards]
        return max(map(sum, pairs)), max(map(sum, zip(*pairs, strict=True)))

    if_keys_rotate, if_queries_rotate = grid.cached("most pairs", most_pairs)
    return if_queries_rotate <= MAX_IMBALANCE * if_keys_rotate
