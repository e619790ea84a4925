"""`Widths`: widths of a model's tensors, and parameter counts of the units that FSDP2 gathers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from armillary.models import GPTConfig, LlamaConfig
from armillary.models.state_config import Mixer


@dataclass(frozen=True)
class Widths:
    """Widths of a model's tensors, and parameter counts by FSDP unit (embedding, each block, head, and the root).

    Args:
        inner: width inside the MLP.
        gated: True for LLaMA: the MLP has a gate (SwiGLU), and positions are rotations (RoPE). False for GPT.
        head_norms: True if queries and keys have norms.
        block: number of parameters of a block.
        after_attention: number of these in the part after attention: output projection, second norm and MLP.
        output_norm: number of parameters of the norm on the delta rule's outputs; 0 in other blocks.
        table, head: numbers of parameters of embedding and head; 0 if they are tied, and so belong to the root.
        root: number of parameters that stay gathered until the end of backward: the last norm, and a tied table with
            learned positions.
    """

    dim: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    layers: int
    gated: bool
    head_norms: bool
    block: int
    after_attention: int
    output_norm: int
    table: int
    head: int
    root: int

    @classmethod
    @lru_cache(maxsize=64)  # a search estimates thousands of steps of one model
    def of(cls, model: LlamaConfig | GPTConfig, mixer: Mixer = "attention") -> Widths:
        """Returns the widths of a model, and of its blocks with one mixer."""
        llama = isinstance(model, LlamaConfig)
        if llama:
            block = model.block_parameters(mixer)
            blocks = sum(count * model.block_parameters(kind) for kind, count in model.mixer_counts().items())
        else:
            block = replace(model, layers=2).parameters() - replace(model, layers=1).parameters()
            blocks = model.layers * block
        outside_blocks = model.parameters() - blocks
        inner = model.hidden_dim if llama else 4 * model.dim
        states = model.states if llama and mixer != "attention" else None
        mixed_width = model.heads * model.head_dim if states is None else states.values
        # Output projection, MLP (SwiGLU has 3 matrices, a GPT's 2), and vectors: LLaMA's norm E; of a GPT the biases
        # of output (E) and MLP (4 E, E) and its LayerNorm (2 E).
        after_attention = (
            mixed_width * model.dim + (3 if llama else 2) * model.dim * inner + (model.dim if llama else 8 * model.dim)
        )
        unit = 0 if not llama or model.tied_embeddings else model.vocab_size * model.dim
        return cls(
            dim=model.dim,
            heads=model.heads,
            key_heads=model.kv_heads,
            head_dim=model.head_dim,
            inner=inner,
            vocabulary=model.vocab_size,
            layers=model.layers,
            gated=llama,
            head_norms=llama and model.qk_norm and states is None,
            block=block,
            after_attention=after_attention,
            output_norm=states.value_dim if states is not None and mixer == "delta_rule" else 0,
            table=unit,
            head=unit,
            root=outside_blocks - 2 * unit,
        )

    def shard(self, ranks: int) -> Widths:
        """Returns the widths of one of `ranks` tensor-parallel ranks.

        Norms, and a GPT's output biases and learned positions, are replicated; everything else is divided by `ranks`.
        """
        if ranks == 1:
            return self
        # Replicated vectors in a block. LLaMA has two norms (2 E). A GPT has two LayerNorms (4 E) and the biases of two
        # row-parallel layers (2 E).
        unsharded_in_block = (2 if self.gated else 6) * self.dim + self.output_norm
        unsharded_in_block += 2 * self.head_dim if self.head_norms else 0
        # Of these, the second norm and both biases are after attention.
        unsharded_after = self.dim if self.gated else 4 * self.dim
        table = self.vocabulary * self.dim
        unsharded_root = self.root - (table if self.tied else 0)

        def part(count: int, unsharded: int) -> int:
            return unsharded + (count - unsharded) // ranks

        return replace(
            self,
            heads=self.heads // ranks,
            key_heads=self.key_heads // ranks,
            inner=self.inner // ranks,
            vocabulary=-(-self.vocabulary // ranks),
            block=part(self.block, unsharded_in_block),
            after_attention=part(self.after_attention, unsharded_after),
            table=self.table // ranks,
            head=self.head // ranks,
            root=part(self.root, unsharded_root),
        )

    @property
    def outside_blocks(self) -> int:
        """Number of parameters outside of blocks: embedding, last norm and head."""
        return self.table + self.head + self.root

    @property
    def tied(self) -> bool:
        """True if the head is the embedding table."""
        return self.head == 0
