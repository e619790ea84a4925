"""GPT-2 (Radford et al., 2019) as a plain module on one device: LayerNorm, learned positions, GELU, biases, tied head.

Like `Llama` it contains no parallelism. Attributes have the names of Hugging Face's `GPT2LMHeadModel`, except that
queries, keys and values have a projection each, `q_proj`, `k_proj` and `v_proj`. Saved files have Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from armillary.attention import AttentionMask, Local
from armillary.core import SequenceLayout
from armillary.models.block import AttentionFunction, Block, Decoder, HeadFunction
from armillary.models.config import GPTConfig
from armillary.models.hub.pretrained import Pretrained
from armillary.models.layers.projections import ProjectionModule


class GPT(Pretrained):
    """A decoder whose head is its embedding table.

    Weights are torch's defaults until `initialize` or `from_pretrained`.

    Args:
        attention: the attention of every layer; by default `armillary.attention.Local()`.
    """

    kind = GPTConfig
    lm_head = None
    """The embedding table is the head."""
    prepare_head: Callable[[HeadFunction, int], HeadFunction] | None = None
    """See `Llama.prepare_head`."""

    def __init__(self, config: GPTConfig, attention: AttentionFunction | None = None) -> None:
        super().__init__()
        self.config = config
        self.transformer: Transformer = Transformer(config, Local() if attention is None else attention)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AttentionMask | None = None,
        layout: SequenceLayout | None = None,
        head: HeadFunction = F.linear,
    ) -> Any:
        """Token ids [B, T] -> logits [B, T, V]. Arguments and errors as in `Llama.forward`.

        Raises:
            ValueError: also if the sequence has more tokens than the model has learned positions.
        """
        hidden = self.transformer(ids, positions=positions, mask=mask, layout=layout)
        head = head if self.prepare_head is None else self.prepare_head(head, ids.shape[1])
        return head(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """The weight [V, E] of the head: the embedding table."""
        return self.transformer.wte.weight


class Transformer(Decoder):
    """Embeddings, blocks, final norm: token ids [B, T] -> hidden states [B, T, E]."""

    def __init__(self, config: GPTConfig, attention: AttentionFunction) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.max_positions, config.dim)
        self.h = nn.ModuleList(GPTBlock(config, attention) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.dim, eps=config.norm_eps)

    def forward(self, ids: Tensor, *, layout: SequenceLayout | None = None, **options: Any) -> Tensor:
        length = ids.shape[-1] if layout is None else layout.length
        if length > self.config.max_positions:
            raise ValueError(
                f"{length} tokens exceed the {self.config.max_positions} learned positions (max_positions)"
            )
        return super().forward(ids, layout=layout, **options)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(positions)

    @property
    def blocks(self) -> Iterable[Block]:
        return cast(Iterable[Block], self.h)

    @property
    def final_norm(self) -> nn.Module:
        return self.ln_f


class GPTBlock(Block):
    """Attention and MLP, each after a norm and added to the residual stream: [B, T, E] -> [B, T, E]."""

    def __init__(self, config: GPTConfig, attention: AttentionFunction) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = GPTAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = GPTMLP(config)

    @property
    def mixer(self) -> GPTAttention:
        return self.attn

    @property
    def norm(self) -> nn.Module:
        return self.ln_1

    def after_attention(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.attn.c_proj(out.flatten(-2))
        return x + self.mlp(self.ln_2(x))


class GPTAttention(ProjectionModule):
    """Projections and attention of multi-head attention."""

    def __init__(self, config: GPTConfig, attention: AttentionFunction) -> None:
        super().__init__(config.heads, config.kv_heads, config.head_dim, attention)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.dim, config.dim) for _ in range(3))
        self.c_proj = nn.Linear(config.dim, config.dim)


class GPTMLP(nn.Module):
    """An MLP of width 4 E, with GPT-2's tanh approximation of GELU: [B, T, E] -> [B, T, E]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.dim, 4 * config.dim)
        self.c_proj = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
