"""Keys and values of the stages of UPipe: of a round of heads, or latents, from which each stage expands its own.

Latents are sent before the first stage, and their gradients after the last one. Around a ring a rank keeps the latents
of all nodes (`NodeLatents`). Other inner methods send those of a node in each stage (`HeadLatents`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from armillary.attention.call.spec import AttentionMethod, AttentionSpec, Saved
from armillary.attention.methods.ring import GatheringRing
from armillary.attention.rings.reduce import RingReduce
from armillary.attention.tiling.accumulators import Merge, Sum
from armillary.attention.tiling.block_attention import RingBlock
from armillary.attention.tiling.latents import Expansion, value_dim
from armillary.core import Axis, accumulation_dtype, start_head_to_seq, start_seq_to_head


@dataclass
class RoundKeys:
    """Keys and values of a round on one rank, k [B, n, h, D] and v [B, n, h, Dv], and their gradients so far.

    Args:
        inner: the method that attends with them.
        expansion: of k and v, if these are rotary keys and latents.
    """

    inner: AttentionMethod
    k: Tensor
    v: Tensor
    expansion: Expansion | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    @property
    def value_dim(self) -> int:
        return value_dim(self.v, self.expansion)

    def forward(self, q: Tensor, spec: AttentionSpec, heads: range) -> tuple[Tensor, Tensor]:
        """Returns out [B, n, h, Dv] and lse [B, n, h] of this rank's heads of a stage.

        Args:
            spec: the spec of the inner method for these heads.
            heads: the key/value heads of the stage, which are expanded if these are latents.
        """
        out, saved = self.inner.forward(q, self.k, self.v, spec, *self._expansion_to(heads))
        return out, saved.lse

    def backward(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, heads: range) -> Tensor:
        """Returns dq of a stage, and adds its part of dk and dv to their sums. Arguments as in `forward`."""
        saved = Saved(q, self.k, self.v, out, lse)
        dq, dk, dv = self.inner.backward(dout, saved, spec, *self._expansion_to(heads))
        self.add_grads(dk, dv)
        return dq

    def add_grads(self, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of one stage. Only a second stage widens the sum to the accumulation dtype."""
        self.dk = dk if self.dk is None else self.dk.to(accumulation_dtype(dk.dtype)).add_(dk)
        self.dv = dv if self.dv is None else self.dv.to(accumulation_dtype(dv.dtype)).add_(dv)

    def without_heads(self) -> RoundKeys:
        """Returns keys and values of 0 heads, for all-to-alls in which this rank sends no gradients."""
        k, v = (x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (self.k, self.v))
        return RoundKeys(self.inner, k, v)

    def _expansion_to(self, heads: range) -> tuple[Expansion, ...]:
        return () if self.expansion is None else (self.expansion.of_heads(heads),)


@dataclass
class HeadLatents(RoundKeys):
    """Latents of the ranks of a head axis. The inner method sends them to the other ranks in each stage.

    Args:
        sizes: number of tokens of each rank of `axis`, before they are gathered.
    """

    axis: Axis = field(kw_only=True)
    sizes: tuple[int, ...] = field(kw_only=True)

    @classmethod
    def gather(
        cls, axis: Axis, sizes: tuple[int, ...], inner: AttentionMethod, k: Tensor, v: Tensor, expansion: Expansion
    ) -> HeadLatents:
        """Gathers rotary keys k and latents v of the ranks of `axis`."""
        pending = [start_seq_to_head(x, axis, sizes, (range(1),) * axis.size) for x in (k, v)]
        k, v = (transfer.wait() for transfer in pending)
        return cls(inner, k, v, expansion, axis=axis, sizes=sizes)

    def token_grads(self) -> tuple[Tensor, Tensor]:
        """Sends the sums of gradients to the owners of the latents. Returns those of this rank's tokens, dk and dv."""
        # Each rank has sums over its own heads. The owner of the tokens adds them up.
        sums = (cast(Tensor, grad).to(accumulation_dtype(self.k.dtype)) for grad in (self.dk, self.dv))
        heads = (range(1),) * self.axis.size
        pending = [start_head_to_seq(total, self.axis, self.sizes, heads) for total in sums]
        dk, dv = (transfer.wait() for transfer in pending)
        return dk, dv


class NodeLatents:
    """Latents of all nodes, of which a rank keeps L + Dr numbers a token, so that no stage sends them again.

    Args:
        ring: rotates rotary keys k and latents v, and gathers them within each node.
        spec: the spec of the first stage.
    """

    def __init__(self, ring: GatheringRing, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion) -> None:
        self.ring, self.expansion, self.value_dim = ring, expansion, expansion.value_dim
        spec = ring.gathering_spec(spec)
        self.rotation = ring.rotation("keys", spec)
        self.blocks = [ring.gathered_block(step, spec) for step in range(len(self.rotation.steps))]
        self.shards, self.grads = list[tuple[Tensor, ...]](), list[tuple[Sum, ...]]()
        for current in self.rotation.rotate(k, v):
            block, shard = self.blocks[current.step], current.tensors
            if block is not None:
                rotary, latents = (x.clone() for x in shard)  # because `rotate` reuses its receive buffers
                shard = block.gather(rotary, latents)
            self.shards.append(shard)
            self.grads.append(tuple(map(Sum.like, shard)))

    def forward(self, q: Tensor, spec: AttentionSpec, heads: range) -> tuple[Tensor, Tensor]:
        accumulator = Merge.of(q, self.value_dim)
        for block, (rotary, latents), _ in self._steps(spec, heads):
            block.forward(q, rotary, latents, accumulator)
        return accumulator.result()

    def backward(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, heads: range) -> Tensor:
        dq = Sum.like(q)
        for block, (rotary, latents), (drotary, dlatents) in self._steps(spec, heads):
            block.backward(dout, q, rotary, latents, out, lse, dq, drotary, dlatents)
        return dq.value()

    def token_grads(self) -> tuple[Tensor, Tensor]:
        sums = RingReduce(self.rotation)
        for step, (block, grads) in enumerate(zip(self.blocks, self.grads, strict=True)):
            # Summed over the heads of the node's ranks, then over nodes.
            drotary, dlatents = (grad.value() for grad in grads)
            sums.push(step, (drotary, dlatents) if block is None else block.scatter(drotary, dlatents))
        drotary, dlatents = sums.finish()
        return drotary, dlatents

    def _steps(
        self, spec: AttentionSpec, heads: range
    ) -> Iterator[tuple[RingBlock, tuple[Tensor, ...], tuple[Sum, ...]]]:
        """Yields the attention over the latents of each node, these latents, and the sums of their gradients."""
        spec, expansion = self.ring.gathering_spec(spec), self.expansion.of_heads(heads)
        for step, shard in enumerate(self.shards):
            if (block := self.ring.gathered_block(step, spec, expansion)) is not None:
                yield block.block, shard, self.grads[step]


Latents = HeadLatents | NodeLatents
StageKeys = RoundKeys | NodeLatents
