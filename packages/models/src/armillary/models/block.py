"""`Block` and `Decoder`, the base classes of LLaMA and GPT: attention and MLP on a residual stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable
from weakref import ref

import torch
from torch import Tensor, nn

from armillary.attention import AttentionMask, TokenProjections
from armillary.core import SequenceLayout, label
from armillary.core.internal import check_local
from armillary.models.layers.projections import HeadProjections, ProjectionModule
from armillary.models.layers.rope import RotaryEmbedding
from armillary.models.layers.state_mixers import StateMixer
from armillary.models.layers.token_functions import in_chunks


class AttentionFunction(Protocol):
    """Attention of a layer: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D].

    `layout` gives the positions of the T tokens in the sequence. If the object has a method `projected`
    (`TakesProjections`), as armillary's methods do, blocks call `projected` instead.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


@runtime_checkable
class TakesProjections(Protocol):
    """Attention that calls the projections to q, k and v itself: hidden states x [B, T, E] -> [B, T, H, D]."""

    def projected(
        self, x: Tensor, projections: TokenProjections, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


# From hidden states [B, T, E] and the head's weight [V, E] to the model's result: logits or a loss.
HeadFunction = Callable[..., Any]


class Context:
    """Arguments of attention that all blocks of a forward pass share: number of tokens, rotation, mask and layout."""

    # Not a dataclass: FSDP2 casts every tensor among a block's arguments to the compute dtype, and rebuilds dataclasses
    # to reach the tensors inside. Cosines in bfloat16 have too few digits for long sequences.
    def __init__(
        self, tokens: int, rotation: RotaryEmbedding | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> None:
        self.tokens: int = tokens
        self.rotation: RotaryEmbedding | None = rotation
        self.mask: AttentionMask = mask
        self.layout: SequenceLayout | None = layout
        # A list of at most one `Checkpoint`, which refers to its block. All blocks share the list: a block that runs
        # under an activation checkpointing policy puts its checkpoint there, for the next block.
        self.previous_checkpoint: list[ref[Any]] = []

    def for_block(self, block: Block) -> Context:
        """Returns this context with the block's window in its mask."""
        # Called outside of the block, because torch.compile traces the block and should not trace masks.
        if block.window is None:
            return self
        return self.changed(mask=with_window(self.mask, block.window - 1))

    def changed(
        self, mask: AttentionMask | None = None, layout: SequenceLayout | None = None, tokens: int | None = None
    ) -> Context:
        """Returns a copy with these values changed, which shares `previous_checkpoint`."""
        context = Context(tokens or self.tokens, self.rotation, mask or self.mask, layout or self.layout)
        context.previous_checkpoint = self.previous_checkpoint
        return context


@lru_cache(maxsize=8)  # so that all layers share one object: a mask may hold many documents
def with_window(mask: AttentionMask, left_width: int) -> AttentionMask:
    """Returns the mask with a window: a query sees at most `left_width` keys before its own."""
    return mask.narrow(left_width)


class Block(nn.Module):
    """[B, T, E] -> [B, T, E]: attention, then the token-wise part (`after_attention`), both on the residual stream."""

    # Computes both parts: `run_plainly`, unless an activation checkpointing policy replaces it.
    run: Callable[[Block, Tensor, Context], Tensor]
    # R under tensor parallelism over R ranks, else 1. The block's input has every R-th token; its norms gather the
    # tokens of all R ranks for attention and MLP.
    gathered_ranks: int = 1
    # The largest number of keys that a query of this layer sees, its own included; None for all keys.
    window: int | None = None

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
        """The layer's attention. Can be set."""
        return self.mixer.attention

    @attention.setter
    def attention(self, attention: AttentionFunction) -> None:
        self.mixer.attention = attention

    def projections(self, context: Context, normed: bool) -> HeadProjections:
        """Returns the projections to q, k and v, from norm(x) if `normed`, else from x, the block's input."""
        return cast(ProjectionModule, self.mixer).projections(context.rotation, None if normed else self.norm)

    @abstractmethod
    def after_attention(self, x: Tensor, out: Tensor) -> Tensor:
        """Computes the token-wise part of x [B, T, E] and attention's out [B, T, H, D]: projection, MLP, residuals."""


def attend(block: Block, x: Tensor, context: Context) -> Tensor:
    """Computes the mixer's output [B, T, H, D] from the block's input x [B, T, E], under autograd."""
    normed_x = block.norm(x)
    if block.gathered_ranks > 1:
        normed_x = normed_x[:, : context.tokens]  # without the padding of gathered tokens to a multiple of ranks
    mixer = block.mixer
    with label("attention"):
        if isinstance(mixer, StateMixer):
            return mixer(normed_x, mask=context.mask, layout=context.layout)
        projections = mixer.projections(context.rotation, norm=None)
        if isinstance(mixer.attention, TakesProjections):
            # The method decides when to project: UPipe stage by stage, Ulysses keys while queries are being sent.
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
    """Token ids [B, T] -> hidden states [B, T, E]: embedding, blocks, and a norm."""

    # True: the final norm saves only its input, and runs on `chunk` tokens at a time.
    norm_in_chunks: bool = False
    # Tokens in a chunk of the final norm; None for the default of `armillary.core.token_chunks`.
    chunk: int | None = None

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AttentionMask | None = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        positions = checked_positions(ids, positions, layout)
        x = self.run_blocks(ids, positions, AttentionMask(causal=True) if mask is None else mask, layout)
        norm = self.final_norm
        return in_chunks(norm, (x,), norm, self.chunk) if self.norm_in_chunks else norm(x)

    def run_blocks(self, ids: Tensor, positions: Tensor, mask: AttentionMask, layout: SequenceLayout | None) -> Tensor:
        """Embeds the ids and runs all blocks, [B, T] -> [B, T, E]. No caller keeps the embeddings alive meanwhile."""
        x = self.embed(ids, positions)
        # Cosines and sines are computed once for all blocks.
        context = Context(ids.shape[1], self.rotation(positions, x.dtype), mask, layout)
        for block in self.blocks:
            x = block(x, context.for_block(block))
        return x

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
        """Returns RoPE's cosines and sines at these positions; None for a model without RoPE."""
        return None


def checked_positions(ids: Tensor, positions: Tensor | None, layout: SequenceLayout | None) -> Tensor:
    """Returns the positions [T] or [B, T] on the device of `ids`; by default 0 to T - 1, or the layout's.

    Raises:
        ValueError: `ids` or positions are not local tensors, `ids` do not have two dims, positions do not match the
            ids, or they are missing although `layout` has several shards.
    """
    check_local("ids", ids)
    if ids.ndim != 2:
        raise ValueError(f"ids must be [B, T]; got {tuple(ids.shape)}")
    if positions is None and layout is not None and layout.shards > 1:
        raise ValueError(f"positions are needed for a sequence in {layout.shards} shards: layout.positions(shard)")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device) if layout is None else layout.positions(0)
    check_local("positions", positions)
    if positions.shape not in (ids.shape, ids.shape[1:]) or positions.is_floating_point():
        description = f"{tuple(positions.shape)} of {positions.dtype}"
        raise ValueError(f"positions must be integers [T] or [B, T] for ids {tuple(ids.shape)}; got {description}")
    return positions.to(ids.device)
