"""What the estimate needs to know of a model: widths, and how many numbers each gathered unit has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.models import GPTConfig, LlamaConfig


@dataclass(frozen=True)
class Widths:
    """Widths of a model, and numbers of parameters by units that FSDP gathers together.

    Args:
        inner: the width inside the MLP.
        gated: the MLP has a gate (SwiGLU), and positions are rotations (RoPE).
        head_norms: queries and keys go through norms of their own.
        block: of a block; `rest` of them are used after attention.
        table: of the embedding, where it is a unit of its own.
        head: of the head, likewise.
        root: of what stays gathered from forward to the end of backward: norms, and a tied table with its positions.
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
    rest: int
    table: int
    head: int
    root: int

    @classmethod
    def of(cls, model: LlamaConfig | GPTConfig) -> Widths:
        block = replace(model, layers=2).parameters() - replace(model, layers=1).parameters()
        around = model.parameters() - model.layers * block
        llama = isinstance(model, LlamaConfig)
        inner = model.hidden_dim if llama else 4 * model.dim
        attended = model.heads * model.head_dim
        rest = attended * model.dim + (3 if llama else 2) * model.dim * inner + (model.dim if llama else 8 * model.dim)
        alone = 0 if not llama or model.tied_embeddings else model.vocab_size * model.dim
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
            rest=rest,
            table=alone,
            head=alone,
            root=around - 2 * alone,
        )

    @property
    def all(self) -> int:
        """Numbers of parameters."""
        return self.layers * self.block + self.table + self.head + self.root

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table."""
        return self.head == 0
