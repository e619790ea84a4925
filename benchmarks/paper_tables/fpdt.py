"""FPDT (arXiv 2408.16978) in formulas: Ulysses chunk by chunk, with keys on the host."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.plan import Cluster
from armillary.plan.arguments import Model, model_of
from paper_tables.steps import Step

CHUNK = 2**16
"""Tokens of a chunk, over all ranks: the size that FPDT's text recommends."""


@dataclass(frozen=True)
class Fpdt:
    """FPDT of LLaMA-3-8B on 8 H100, based on Ulysses on the same ranks.

    Forward: for each chunk of queries, the ranks exchange it (all-to-all), and fetch the keys and values of all chunks
    up to it from the host, two at a time. Backward: for each chunk of keys, all chunks of queries from it on.

    Args:
        ulysses: the predicted step of Ulysses, whose inputs of blocks and optimizer are on the host.
    """

    length: int
    ulysses: Step

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @property
    def pairs(self) -> int:
        """Pairs of a query chunk and a key chunk that are visible under the causal mask."""
        return self.chunks * (self.chunks + 1) // 2

    @property
    def head(self) -> int:
        """Bytes of one head of a chunk in bfloat16, which one rank holds after the all-to-all."""
        return CHUNK * self.model.head_dim * 2

    @property
    def model(self) -> Model:
        return model_of("llama3-8b", self.length)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key heads of a rank."""
        return self.model.heads // 8, self.model.kv_heads // 8

    @property
    def forward_copies(self) -> int:
        """Bytes of a block's copies: out and q, k, v to the host, and k, v back for each pair of chunks."""
        queries, keys = self.heads
        return self.head * (self.chunks * (2 * queries + 2 * keys) + self.pairs * 2 * keys)

    @property
    def backward_copies(self) -> int:
        """Bytes of a block's copies.

        For each pair of chunks q, out and dout come from the host, and dq goes both ways in float32; k, v and their
        float32 gradients are copied once.
        """
        queries, keys = self.heads
        return self.head * (self.pairs * (3 + 2 * 2) * queries + self.chunks * (2 + 2 * 2) * keys)

    @property
    def attention_memory(self) -> int:
        """Bytes on the device in backward: k, v, dk and dv of one chunk; q, out, dout and dq of two."""
        queries, keys = self.heads
        exchanged = 2 * (queries + 2 * keys)  # before and after an all-to-all
        return self.head * ((2 + 2 * 2) * keys + 2 * (3 + 2) * queries + exchanged)

    @property
    def device(self) -> float:
        """Bytes of the device: Ulysses' with other tensors of attention, or at its largest moment outside attention."""
        memory = self.ulysses.memory
        outside = max(size for moment, size in memory.moments.items() if "attention" not in moment)
        attention = memory.device - memory.device_breakdown.get("attention", 0) + self.attention_memory
        return max(attention, outside)

    @property
    def host_per_token(self) -> int:
        """Bytes on all hosts for each token: q, k, v, out and dout of one block in bfloat16, and dq in float32."""
        queries, keys = self.model.heads * self.model.head_dim, self.model.kv_heads * self.model.head_dim
        return 2 * (3 * queries + 2 * keys) + 4 * queries

    @property
    def inputs_per_token(self) -> int:
        """Bytes on all hosts for each token: inputs of all blocks."""
        return 2 * self.model.layers * self.model.dim

    @property
    def copies(self) -> float:
        """Seconds of a step's copies between device and host. Forward runs again in backward."""
        size = self.model.layers * (2 * self.forward_copies + self.backward_copies)
        return size / Cluster.named("8xh100").accelerator.host_bandwidth

    @property
    def seconds(self) -> float:
        """Seconds of a step: Ulysses' step, and the copies that attention does not hide."""
        time = self.ulysses.time
        computed = time.attention + time.recomputed
        return time.seconds + max(0.0, self.copies - computed)
