"""The base classes of LLaMA's and GPT's blocks and decoders: attention and the MLP on a residual stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable
from weakref import ref

import torch
from torch import Tensor, nn

from armillary.attention import AttentionMask, Method, TokenProjections
from armillary.attention.call.validation import over_all_ranks
from armillary.attention.context_parallel.communication import sequence_axis
from armillary.core import SequenceLayout, compat, label, relayout
from armillary.models.layers.chunked import in_chunks
from armillary.models.layers.projections import HeadProjections, ProjectionModule
from armillary.models.layers.rope import RotaryEmbedding
from armillary.models.layers.state_mixers import StateMixer


class AttentionFunction(Protocol):
    """Attention of a layer: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D], with the layout of the T tokens.

    If it has a method `projected`, as armillary's methods do, that is called with projections instead.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


@runtime_checkable
class TakesProjections(Protocol):
    """Attention that computes q, k and v itself, from projections."""

    def projected(
        self, x: Tensor, projections: TokenProjections, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


HeadFunction = Callable[..., Any]
"""From hidden states [B, T, E] and the head's weight [V, E] to the model's result: logits, a loss."""


class Context:
    """Arguments of attention that all blocks of a forward pass share: number of tokens, rotation, mask and layout.

    Not a dataclass: FSDP2 casts every tensor among a block's arguments to the compute dtype, and rebuilds dataclasses
    to reach the tensors inside. Cosines in bfloat16 have too few digits for long sequences.

    `previous_checkpoint` is a list of at most one element, shared by all blocks: the activation checkpoint of the
    previous block, if it has one.
    """

    def __init__(
        self, tokens: int, rotation: RotaryEmbedding | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> None:
        self.tokens, self.rotation, self.mask, self.layout = tokens, rotation, mask, layout
        self.previous_checkpoint: list[ref[Any]] = []  # a `Checkpoint`, which refers to its block

    def for_block(self, block: Block) -> Context:
        """Returns the context with a block's own mask. Built outside of the block: torch.compile traces the block."""
        if block.window is None:
            return self
        return self.changed(mask=with_window(self.mask, block.window - 1))

    def for_states(self, method: Method, contiguous: bool) -> Context:
        """Returns the context of recurrent blocks, whose layout has a shard for each rank of all axes of attention.

        Args:
            contiguous: gives these blocks contiguous shards, whatever layout the call has.
        """
        if self.layout is None and method.shards > 1:
            return self  # the layer raises an error for the missing layout
        layout = over_all_ranks(self.layout or SequenceLayout.contiguous(self.tokens, 1), method)
        if contiguous:
            layout = SequenceLayout.contiguous(layout.length, layout.shards)
        return self.changed(layout=layout, tokens=layout.sizes[method.shard])

    def changed(
        self, mask: AttentionMask | None = None, layout: SequenceLayout | None = None, tokens: int | None = None
    ) -> Context:
        """Returns the context with other values, and the same previous checkpoint."""
        context = Context(tokens or self.tokens, self.rotation, mask or self.mask, layout or self.layout)
        context.previous_checkpoint = self.previous_checkpoint
        return context


@lru_cache(maxsize=8)
def with_window(mask: AttentionMask, left_width: int) -> AttentionMask:
    """Returns the mask with a window. Cached, so that all layers share one object: a mask may hold many documents."""
    return mask.narrow(left_width)


class Block(nn.Module):
    """[B, T, E] -> [B, T, E]: attention, then the token-wise part (`after_attention`), both on the residual stream.

    `run` computes both: `run_plainly`, unless an activation checkpointing policy replaces it. `gathered_ranks` is the
    number of ranks whose tokens the norms gather under tensor parallelism: attention and MLP see that many tokens for
    each token of the block's input.
    """

    run: Callable[[Block, Tensor, Context], Tensor]
    gathered_ranks: int = 1
    window: int | None = None
    """The largest number of keys that a query of this layer sees, its own included; None for all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.run = run_plainly

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.run(self, x, context)

    @property
    @abstractmethod
    def mixer(self) -> ProjectionModule | StateMixer:
        """Attention, or the layer with a state in its place."""

    @property
    @abstractmethod
    def norm(self) -> nn.Module:
        """The norm before the mixer."""

    @property
    def attention(self) -> AttentionFunction:
        """The layer's attention; can be set."""
        return self.mixer.attention

    @attention.setter
    def attention(self, attention: AttentionFunction) -> None:
        self.mixer.attention = attention

    def projections(self, context: Context, normed: bool) -> HeadProjections:
        """Returns the projections to q, k and v. Their input is norm(x) if `normed`, else x: they apply the norm."""
        return cast(ProjectionModule, self.mixer).projections(context.rotation, None if normed else self.norm)

    @abstractmethod
    def after_attention(self, x: Tensor, out: Tensor) -> Tensor:
        """Computes the token-wise part from x [B, T, E] and attention's out [B, T, H, D]: output projection and MLP."""


def attend(block: Block, x: Tensor, context: Context) -> Tensor:
    """Computes attention, or the layer with a state in its place, out [B, T, H, D], under autograd."""
    normed_x = block.norm(x)
    if block.gathered_ranks > 1:
        normed_x = normed_x[:, : context.tokens]  # gathered tokens are padded to a multiple of ranks
    mixer = block.mixer
    with label("attention"):
        if isinstance(mixer, StateMixer):
            return mixer(normed_x, mask=context.mask, layout=context.layout)
        projections = mixer.projections(context.rotation, norm=None)
        if isinstance(mixer.attention, TakesProjections):  # UPipe projects stage by stage; others overlap sends
            return mixer.attention.projected(normed_x, projections, mask=context.mask, layout=context.layout)
        q = projections.q(normed_x, range(projections.heads))
        k, v = projections.kv(normed_x, range(projections.key_heads))
        return mixer.attention(q, k, v, mask=context.mask, layout=context.layout)


def run_plainly(block: Block, x: Tensor, context: Context) -> Tensor:
    """Runs a block under autograd, which saves every tensor that backward needs."""
    out = attend(block, x, context)
    with label("mlp"):
        return block.after_attention(x, out)


class Decoder(nn.Module):
    """Token ids [B, T] -> hidden states [B, T, E]: embedding, blocks, and a norm.

    With `norm_in_chunks` the final norm saves only its input, and runs on `chunk` tokens at a time. With
    `contiguous_states` hidden states move to contiguous shards before blocks with a state, and back after them.
    """

    norm_in_chunks: bool = False
    chunk: int | None = None
    contiguous_states: bool = False

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AttentionMask | None = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        positions = checked_positions(ids, positions, layout)
        x = self.embed(ids, positions)
        mask = AttentionMask(causal=True) if mask is None else mask
        # Cosines and sines are computed once for all blocks.
        context = Context(ids.shape[1], self.rotation(positions, x.dtype), mask, layout)
        # In a hybrid, blocks with a state have a context of their own, which may have another layout.
        methods = [block.attention for block in self.blocks if isinstance(block.mixer, StateMixer)]
        method = methods[0] if methods and isinstance(methods[0], Method) else None
        state_context = context if method is None else context.for_states(method, self.contiguous_states)
        current = context  # x is in the layout of this context
        for block in self.blocks:
            block_context = state_context if isinstance(block.mixer, StateMixer) else context
            x, current = self.relayout(x, current, block_context, method), block_context
            x = block(x, block_context.for_block(block))
        x = self.relayout(x, current, context, method)
        norm = self.final_norm
        return in_chunks(norm, (x,), norm, self.chunk) if self.norm_in_chunks else norm(x)

    def relayout(self, x: Tensor, source: Context, target: Context, method: Method | None) -> Tensor:
        """Moves hidden states [B, T, E] from the layout of `source` to that of `target`, if `contiguous_states`."""
        if not self.contiguous_states or source is target or method is None:
            return x
        if source.layout is None or target.layout is None:
            return x  # one rank
        layouts = over_all_ranks(source.layout, method), over_all_ranks(target.layout, method)
        return relayout(x, *layouts, sequence_axis(method))

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the embeddings [B, T, E]."""

    @property
    @abstractmethod
    def blocks(self) -> Iterable[Block]:
        """The blocks, in order."""

    @property
    @abstractmethod
    def final_norm(self) -> nn.Module:
        """The norm after the last block."""

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> RotaryEmbedding | None:
        """Returns the rotary embedding at these positions; None unless overridden."""
        return None


def checked_positions(ids: Tensor, positions: Tensor | None, layout: SequenceLayout | None) -> Tensor:
    """Returns the positions [T] or [B, T] on the device of `ids`.

    Raises:
        ValueError: positions that do not match the ids, or are missing on a shard.
    """
    if compat.is_dtensor(ids) or compat.is_dtensor(positions):
        raise ValueError("ids or positions are a DTensor; pass it to the model: the decoder takes only local tensors")
    if ids.ndim != 2:
        raise ValueError(f"ids must be [B, T]; got {tuple(ids.shape)}")
    if positions is None and layout is not None and layout.shards > 1:
        raise ValueError(f"positions are needed for a sequence in {layout.shards} shards: layout.positions(shard)")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device) if layout is None else layout.positions(0)
    if positions.shape not in (ids.shape, ids.shape[1:]) or positions.is_floating_point():
        description = f"{tuple(positions.shape)} of {positions.dtype}"
        raise ValueError(f"positions must be integers [T] or [B, T] for ids {tuple(ids.shape)}; got {description}")
    return positions.to(ids.device)
