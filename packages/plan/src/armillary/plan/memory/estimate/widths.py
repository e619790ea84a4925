"""Widths of a model, and parameter counts of the units that FSDP gathers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.models import GPTConfig, LlamaConfig


@dataclass(frozen=True)
class Widths:
    """Widths of a model, and parameter counts by FSDP unit.

    Args:
        inner: width inside the MLP.
        gated: the MLP has a gate (SwiGLU), and positions are rotations (RoPE).
        head_norms: queries and keys have norms.
        block: parameters of a block, `after_attention` of them in the part after attention.
        table, head: parameters of embedding and head, if they are units; 0 if they are tied.
        root: parameters that stay gathered until the end of backward: norms, and a tied table with positions.
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
    table: int
    head: int
    root: int

    @classmethod
    def of(cls, model: LlamaConfig | GPTConfig) -> Widths:
        """Returns the widths of a model.

        Raises:
            ValueError: a hybrid, whose blocks differ.
        """
        if isinstance(model, LlamaConfig) and model.states is not None:
            raise ValueError(f"mixers={model.mixers}: formulas of memory and time know attention alone")
        block = replace(model, layers=2).parameters() - replace(model, layers=1).parameters()
        outside_blocks = model.parameters() - model.layers * block
        llama = isinstance(model, LlamaConfig)
        inner = model.hidden_dim if llama else 4 * model.dim
        attention_width = model.heads * model.head_dim
        after_attention = (
            attention_width * model.dim
            + (3 if llama else 2) * model.dim * inner
            + (model.dim if llama else 8 * model.dim)
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
            head_norms=llama and model.qk_norm,
            block=block,
            after_attention=after_attention,
            table=unit,
            head=unit,
            root=outside_blocks - 2 * unit,
        )

    def sharded(self, ranks: int) -> Widths:
        """The widths of one of `ranks` tensor-parallel ranks: norms, a GPT's output biases and positions are whole."""
        if ranks == 1:
            return self
        unsharded_in_block = (2 if self.gated else 6) * self.dim + (2 * self.head_dim if self.head_norms else 0)
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
    def all(self) -> int:
        """Number of all parameters."""
        return self.layers * self.block + self.table + self.head + self.root

    @property
    def tied(self) -> bool:
        """True if the head is the embedding table."""
        return self.head == 0
