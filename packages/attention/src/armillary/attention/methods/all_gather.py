"""All-gather of keys and values, as LLaMA 3 was trained (arXiv 2407.21783, section 3.3.2).

    gather    k, v of all ranks
    attend    this rank's queries over all keys

This sends few bytes if there are few key/value heads. But each rank has the keys and values of the full sequence in
memory, and no computation overlaps with the gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.call.qkv_sources import concatenate
from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.methods.base import Method
from armillary.attention.tiling.accumulators import WHOLE_DIM, Merge, Sum
from armillary.attention.tiling.block_attention import RingBlock
from armillary.attention.tiling.latents import Expansion, block_of, value_dim
from armillary.core import Axis, start_all_gather, start_reduce_scatter


class AllGatherKV(Method):
    """All-gather of keys and values over one mesh axis of P ranks.

    The full sequence is q [B, N, H, D], k [B, N_k, K, D], v [B, N_k, K, Dv] and out [B, N, H, Dv], sharded on dim 1; a
    rank has T queries and S keys of it.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`.

    Bytes sent by a rank, for e bytes an element and a bytes an accumulated gradient element, with Dv = D: forward
    (P - 1) 2 B S K D e, all-gather; backward the same all-gather again, because gathered keys are not saved, and
    (P - 1) 2 B S K D a, reduce-scatter. If shards have unequal sizes, the all-gather pads each to the largest.
    """

    fits_inside_ring = True
    takes_latents = True

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis: Axis = Axis.of(axis)
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        accumulator = Merge.of(q, value_dim(v, expansion))
        all_k, all_v = self._gather(k, v, spec)
        for block, keys in self._blocks(spec, expansion):
            block.forward(q, all_k[:, keys], all_v[:, keys], accumulator)
        out, lse = accumulator.result()
        return out, Saved(q, k, v, out, lse)

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        all_k, all_v = self._gather(saved.k, saved.v, spec)
        dq, key_grads = Sum.like(saved.q), list[tuple[Tensor, Tensor]]()
        for block, keys in self._blocks(spec, expansion):
            current = saved._replace(k=all_k[:, keys], v=all_v[:, keys])
            dk, dv = Sum.like(current.k), Sum.like(current.v)
            block.backward(dout, *current, dq, dk, dv)
            key_grads.append((dk.value(), dv.value()))
            del current, dk, dv
        del all_k, all_v  # freed before the buffers of the reduce-scatter are allocated
        grads = [concatenate(list(x), dim=1) for x in zip(*key_grads, strict=True)]
        pending = [start_reduce_scatter(x, self.axis, spec.key_layout.sizes) for x in grads]
        dk, dv = (transfer.wait() for transfer in pending)
        return dq.result(), dk, dv

    def _gather(self, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Returns k [B, N_k, K, D] and v [B, N_k, K, Dv] of all ranks, in the order of the shards."""
        pending = [start_all_gather(x, self.axis, spec.key_layout.sizes) for x in (k, v)]
        k, v = (transfer.wait() for transfer in pending)
        return k, v

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Computes the tiles of calls with `spec` on `rows` rows of the batch, before they run."""
        self._one_shard_spec(spec).plan_block(rows, self.axis.rank, 0)

    def _blocks(self, spec: AttentionSpec, expansion: Expansion | None) -> Iterator[tuple[RingBlock, slice]]:
        """Yields the attention of this rank's queries over some of the gathered keys, and the tokens of these keys.

        Finished keys are one block. Latents are one block per shard, so that expanded keys exist for one shard at a
        time.
        """
        if expansion is None:
            yield self._one_shard_spec(spec).block(self.axis.rank, 0), WHOLE_DIM
            return
        start = 0
        for shard, size in enumerate(spec.key_layout.sizes):
            yield block_of(spec.block(self.axis.rank, shard), expansion), slice(start, start + size)
            start += size

    def _one_shard_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec with a key layout of one shard: the gathered keys. Cached per spec."""
        return spec.cached("gathered", lambda: replace(spec, key_layout=spec.key_layout.coarsen(self.axis.size)))
