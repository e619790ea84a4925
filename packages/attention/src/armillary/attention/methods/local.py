"""Attention on one rank, which has the full sequence."""

from __future__ import annotations

from torch import Tensor

from armillary.attention.call.spec import AttentionSpec, Saved
from armillary.attention.methods.base import Method
from armillary.attention.tiling.accumulators import Merge, Sum
from armillary.attention.tiling.latents import Expansion, block_of, value_dim


class Local(Method):
    """Attention over a sequence that is not sharded: q [B, N, H, D], k [B, N_k, K, D] and v [B, N_k, K, Dv].

    Sends nothing.
    """

    fits_inside_ring = True
    takes_latents = True
    sends_keys = False
    shards = 1
    shard = 0
    sequence_shards = 1

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:
        """Computes the tiles of calls with `spec` on `rows` rows of the batch, before they run."""
        spec.plan_block(rows, 0, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        accumulator = Merge.of(q, value_dim(v, expansion))
        block_of(spec.block(0, 0), expansion).forward(q, k, v, accumulator)
        out, lse = accumulator.result()
        return out, Saved(q, k, v, out, lse)

    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (Sum.like(x) for x in (saved.q, saved.k, saved.v))
        block_of(spec.block(0, 0), expansion).backward(dout, *saved, dq, dk, dv)
        return dq.result(), dk.result(), dv.result()
