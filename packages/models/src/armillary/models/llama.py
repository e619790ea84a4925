"""LLaMA (arXiv 2302.13971, 2407.21783) as a plain module on one device.

The module contains no parallelism: attention is an argument, positions are explicit, and everything else is token-wise.
So it runs on a full sequence or on one shard of it. Attributes and the keys of `state_dict` have the names of Hugging
Face's `LlamaForCausalLM`, except those of layers with a state (`linear_attn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.attention import AttentionMask, Local, Method
from armillary.attention.internal import over_all_ranks, sequence_axis
from armillary.core import SequenceLayout, relayout
from armillary.models.block import AttentionFunction, Block, Context, Decoder, HeadFunction
from armillary.models.config import LlamaConfig, Mixer
from armillary.models.hub.pretrained import Pretrained
from armillary.models.layers.latent_attention import LatentAttention
from armillary.models.layers.projections import ProjectionModule
from armillary.models.layers.rope import RotaryEmbedding
from armillary.models.layers.state_mixers import STATE_MIXERS, StateMixer


class Llama(Pretrained):
    """A decoder and its head. Weights are torch's defaults until `initialize` or `from_pretrained`.

    Args:
        attention: the attention of every layer; by default `armillary.attention.Local()`. It can be changed for each
            layer: `model.model.layers[i].attention`. Layers with a state (`LlamaConfig.mixers`) do not call it, but
            share the sequence over the same ranks.
    """

    kind = LlamaConfig
    prepare_head: Callable[[HeadFunction, int], HeadFunction] | None = None
    """Set by tensor parallelism, which shards the head's weight: turns the `head` of a call and its number of tokens
    into the function to call with sharded hidden states and weight."""

    def __init__(self, config: LlamaConfig, attention: AttentionFunction | None = None) -> None:
        super().__init__()
        self.config = config
        decoder = LlamaDecoder if config.states is None else HybridDecoder
        self.model: LlamaDecoder = decoder(config, Local() if attention is None else attention)
        # A tied head has no module of its own: `to_empty` would make two parameters of one with two names.
        self.lm_head: Head | None = None if config.tied_embeddings else Head(config.dim, config.vocab_size)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AttentionMask | None = None,
        layout: SequenceLayout | None = None,
        head: HeadFunction = F.linear,
    ) -> Any:
        """Token ids [B, T] -> logits [B, T, V].

        Args:
            ids: the tokens of the sequence, or of one shard.
            positions: integers for RoPE: [T], or [B, T] if rows differ, such as positions within documents. Required
                on a shard: `layout.positions(shard)`.
            mask: passed to attention; causal by default.
            layout: passed to attention, for which it gives the positions of the tokens; by default the tokens are a
                full sequence, in order.
            head: called with the hidden states [B, T, E] and the head's weight [V, E], instead of computing logits;
                its result is returned. Pass a chunked loss (`linear_token_loss`) here: within `forward`, FSDP has
                gathered the weight.

        Raises:
            ValueError: `ids` do not have two dims, positions do not match them or are missing on a shard, or `ids`
                or `positions` is a DTensor (pass its `to_local()`).
        """
        hidden = self.model(ids, positions=positions, mask=mask, layout=layout)
        head = head if self.prepare_head is None else self.prepare_head(head, ids.shape[1])
        # `lm_head` calls `head` itself: FSDP gathers its weight only while the module runs.
        return head(hidden, self.head_weight) if self.lm_head is None else self.lm_head(hidden, head)

    @property
    def head_weight(self) -> Tensor:
        """The weight [V, E] of the head: of `lm_head`, or the embedding table if tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight


class Head(nn.Linear):
    """The LM head: calls a function with hidden states and its weight, which FSDP has gathered by then."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, input: Tensor, head: HeadFunction = F.linear) -> Any:
        return head(input, self.weight)


class LlamaDecoder(Decoder):
    """Embedding, blocks, final norm: token ids [B, T] -> hidden states [B, T, E]. Arguments as in `Llama.forward`."""

    def __init__(self, config: LlamaConfig, attention: AttentionFunction) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            LlamaBlock(config, attention, config.window_of(i), config.mixer_of(i)) for i in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(ids)

    @property
    def blocks(self) -> Iterable[Block]:
        return cast(Iterable[Block], self.layers)

    @property
    def final_norm(self) -> nn.Module:
        return self.norm

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> RotaryEmbedding:
        config = self.config
        return RotaryEmbedding.at(positions, config.rotary_dim, config.rope_theta, dtype, config.rope_scaling)


class HybridDecoder(LlamaDecoder):
    """A decoder with blocks that have a state. They have a context of their own, which may have another layout."""

    # True: hidden states move to contiguous shards before blocks with a state, and back after them.
    contiguous_states: bool = False

    def run_blocks(self, ids: Tensor, positions: Tensor, mask: AttentionMask, layout: SequenceLayout | None) -> Tensor:
        method = next((block.attention for block in self.blocks if isinstance(block.mixer, StateMixer)), None)
        if not isinstance(method, Method) or (layout is None and method.shards > 1):
            # All tokens are on one rank; or the layout is missing, and the layer itself raises the error.
            return super().run_blocks(ids, positions, mask, layout)
        x = self.embed(ids, positions)
        context = Context(ids.shape[1], self.rotation(positions, x.dtype), mask, layout)
        # 1. The layout of a state has one shard for each rank of the sequence and head axes. Attention's may have
        # fewer: Ulysses shares a shard of `ring` between the ranks of `ulysses`.
        layout = over_all_ranks(layout or SequenceLayout.contiguous(context.tokens, 1), method)
        state_layout = SequenceLayout.contiguous(layout.length, layout.shards) if self.contiguous_states else layout
        state_context = context.changed(layout=state_layout, tokens=state_layout.sizes[method.shard])
        # 2. The blocks, between which x moves if their layouts differ, and back to attention's layout after the last.
        axis, x_layout = sequence_axis(method), layout
        for block in self.blocks:
            has_state = isinstance(block.mixer, StateMixer)
            block_layout, block_context = (state_layout, state_context) if has_state else (layout, context)
            if block_layout is not x_layout:
                x, x_layout = relayout(x, x_layout, block_layout, axis), block_layout
            x = block(x, block_context.for_block(block))
        return x if x_layout is layout else relayout(x, x_layout, layout, axis)


class LlamaBlock(Block):
    """A mixer and an MLP, each after a norm and added to the residual stream: [B, T, E] -> [B, T, E].

    The mixer's attribute is `self_attn` if it is attention, and `linear_attn` if it has a state.

    Args:
        window: the largest number of keys that a query sees, its own included; None for all keys.
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionFunction,
        window: int | None = None,
        mixer: Mixer = "attention",
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if mixer == "attention":
            kind = LlamaAttention if config.latent is None else LatentAttention
            self.self_attn, self.window = kind(config, attention), window
        else:
            assert config.states is not None  # checked by the config
            self.linear_attn = STATE_MIXERS[mixer](config.dim, config.states, config.norm_eps, attention)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = LlamaMLP(config)

    @property
    def mixer(self) -> LlamaAttention | LatentAttention | StateMixer:
        return self.linear_attn if "linear_attn" in self._modules else self.self_attn

    @property
    def norm(self) -> nn.Module:
        return self.input_layernorm

    def after_attention(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.mixer.o_proj(out.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaAttention(ProjectionModule):
    """Projections and attention of grouped-query attention with RoPE."""

    def __init__(self, config: LlamaConfig, attention: AttentionFunction) -> None:
        super().__init__(config.heads, config.kv_heads, config.head_dim, attention)
        queries, keys, bias = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(config.dim, queries, bias=bias)
        self.k_proj = nn.Linear(config.dim, keys, bias=bias)
        self.v_proj = nn.Linear(config.dim, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.dim, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)


class LlamaMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): [B, T, E] -> [B, T, E]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
