"""Ring Attention (arXiv 2310.01889): keys and values rotate around the ring; queries stay.

    step          0    1    2    3
    rank 0 has    k0   k3   k2   k1
    rank 1 has    k1   k0   k3   k2        each step: send the current shard to rank r + 1 while computing with it
    rank 2 has    k2   k1   k0   k3
    rank 3 has    k3   k2   k1   k0

With the zigzag layout every block of a causal mask costs the same, so all ranks finish each step together.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.methods.base import Method
from armillary.attention.methods.token_ring import pass_queries_backward
from armillary.attention.rotation.returns import RingReduce
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import RingTopology, RotatingSide
from armillary.attention.tiling.merge import Merge, Sum
from armillary.core import Axis
from armillary.core.accumulate import accumulation_dtype
from armillary.core.validation import check_choice

Backward = Literal["auto", "keys", "queries"]


class Ring(Method):
    """Ring Attention over one mesh axis of P ranks.

    The whole sequence is q, out [B, N, H, D], k [B, S, K, D] and v [B, S, K, Dv], sharded on dim 1; a rank has T and
    S / P tokens of it. Any layout is exact; zigzag is balanced under a causal mask.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is created on it, so every rank of the axis must
            construct the method. Construct it once and share it between layers.
        backward: the side that rotates in backward: "keys" (k and v, with dk and dv) or "queries" (q, out, dout and
            lse, with dq). "auto" sends fewer bytes: queries for multi-head attention in 16 bits, otherwise mostly keys.

    Bytes sent by a rank, for e bytes an element and a bytes an accumulated gradient element, all p2p, with Dv = D:
    forward (P - 1) 2 B T K D e; backward (P - 1) 2 B T K D (e + a), or with queries (P - 1) B T H (3 D e + a + D a).
    Less under a mask, as a token travels no further than to the last rank that sees it.

    Raises:
        ValueError: an unknown `backward`.
    """

    def __init__(self, axis: DeviceMesh | Axis, backward: Backward = "auto") -> None:
        self.axis = Axis.of(axis)
        self.backward_side: Backward = check_backward(backward)
        self.return_axis = self.axis.duplicate()
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        ring, accumulator = self.rotation("keys", spec), Merge.of(q, v)
        for current in ring.rotate(k, v):  # sends the current shard while its block is computed
            if current.tensors:  # empty where neither this rank nor a later one sees any of the shard
                block = spec.block(current.query_shard, current.key_shard, keys=current.token_ranges)
                block.forward(q, current.tensors[0], current.tensors[1], accumulator)
        out, lse = accumulator.result()
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = (spec.layout.length, *saved.q.shape[2:]), (spec.key_layout.length, *saved.v.shape[2:])
        if cheaper_side(self.backward_side, queries, keys, saved.q.dtype) == "queries":
            return pass_queries_backward(dout, saved, spec, self.rotation("queries", spec), RingReduce)
        ring, dq = self.rotation("keys", spec), Sum.like(saved.q)
        sums = RingReduce(ring)
        for current in ring.rotate(saved.k, saved.v):
            key_grads = [Sum.like(x) for x in current.tensors]
            if current.tensors:
                block = spec.block(current.query_shard, current.key_shard, keys=current.token_ranges)
                current_saved = saved._replace(k=current.tensors[0], v=current.tensors[1])
                block.backward(dout, *current_saved, dq, key_grads[0], key_grads[1])
                del current_saved  # or the shard would live longer than its step
            # dk and dv follow their keys one step behind, so that they are sent while the next block is computed.
            sums.push(current.step, [grad.result() for grad in key_grads])
        dk, dv = sums.finish()
        return dq.value(), dk, dv

    def rotation(self, side: RotatingSide, spec: AttentionSpec) -> Rotation:
        """Returns the ring of all ranks of the axis, each with its own shard. Made once for a spec."""

        def make() -> Rotation:
            ring = RingTopology.of_all(self.axis.size, side)
            return Rotation.of(self.axis, self.return_axis, ring, spec.grid)

        return spec.cached((side, id(self.axis)), make)


def check_backward(backward: Backward) -> Backward:
    """Raises ValueError for an unknown side."""
    return cast(Backward, check_choice("backward", backward, get_args(Backward)))


def cheaper_side(
    backward: Backward, queries: tuple[int, ...], keys: tuple[int, ...], dtype: torch.dtype
) -> RotatingSide:
    """Chooses the side that rotates in backward: `backward`, or for "auto" the one that sends fewer bytes.

    Compares bytes of whole sequences, not of this rank's shard, so that every rank chooses alike.

    Args:
        queries: (N, H, D), of q.
        keys: (S, K, Dv), of v.
    """
    if backward != "auto":
        return backward
    (length, heads, dim), (key_length, key_heads, value_dim) = queries, keys
    e, a = dtype.itemsize, accumulation_dtype(dtype).itemsize
    key_bytes = key_length * key_heads * (dim + value_dim) * (e + a)  # k and v; dk and dv
    query_bytes = length * heads * ((dim + 2 * value_dim) * e + a + dim * a)  # q, out and dout; lse; dq
    return "queries" if query_bytes < key_bytes else "keys"
