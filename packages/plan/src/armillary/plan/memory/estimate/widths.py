"""`Widths`: widths of a model's tensors, and parameter counts of the units that FSDP2 gathers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from armillary.models import GPTConfig, LlamaConfig, Mixer


@dataclass(frozen=True)
class Widths:
    """Widths of a model's tensors, and parameter counts by FSDP unit (embedding, each block, head, and the root).

    Args:
        inner: width inside the MLP.
        gated: True for LLaMA: the MLP has a gate (SwiGLU), and positions are rotations (RoPE). False for GPT.
        head_norms: True if queries and keys have norms.
        block: number of parameters of a block.
        after_attention: number of these in the part after attention: output projection, second norm and MLP.
        output_norm: number of parameters of the norm on the delta rule's outputs, which tensor parallelism replicates.
        output_biases: number of parameters of the biases of attention's output projection and the MLP's.
        table, head: numbers of parameters of embedding and head; 0 if they are tied, and so belong to the root.
        root: number of parameters that stay gathered until the end of backward: the last norm, a tied table, and a
            GPT's learned positions.
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
    output_biases: int
    table: int
    head: int
    root: int

    @classmethod
    @lru_cache(maxsize=64)  # a search estimates thousands of steps of one model
    def of(cls, model: LlamaConfig | GPTConfig, mixer: Mixer = "attention") -> Widths:
        """Returns the widths of a model. Fields of a block, such as `block`, are those of its blocks with `mixer`."""
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
        # Output projection, MLP (SwiGLU has 3 matrices, a GPT's 2), norm (a LayerNorm has 2 E) and biases.
        output_bias = model.out_bias and states is None if llama else True
        mlp_bias = model.mlp_bias if llama else True
        output_biases = model.dim * (output_bias + mlp_bias)
        hidden_layers, norm = (2, model.dim) if llama else (1, 2 * model.dim)  # layers from E to the MLP's width
        after_attention = mixed_width * model.dim + (hidden_layers + 1) * model.dim * inner + norm + output_biases
        after_attention += hidden_layers * inner if mlp_bias else 0
        table = 0 if not llama or model.tied_embeddings else model.vocab_size * model.dim
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
            output_biases=output_biases,
            table=table,
            head=table,
            root=outside_blocks - 2 * table,
        )

    def shard(self, ranks: int) -> Widths:
        """Returns the widths of one of `ranks` tensor-parallel ranks.

        Heads, MLP and vocabulary are divided by `ranks`. Learned positions, output biases and norms are replicated,
        except Mamba-2's norm on its outputs.
        """
        if ranks == 1:
            return self
        norm = self.dim if self.gated else 2 * self.dim  # a LayerNorm has a bias
        # Replicated vectors in a block. The second norm and the biases are after attention.
        unsharded_after = norm + self.output_biases
        unsharded_in_block = norm + unsharded_after + self.output_norm + (2 * self.head_dim if self.head_norms else 0)
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
        """Number of parameters outside of blocks: embedding, learned positions, last norm and head."""
        return self.table + self.head + self.root

    @property
    def tied(self) -> bool:
        """True if the head is the embedding table."""
        return self.head == 0
