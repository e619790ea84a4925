"""Blocks and decoders of all models: attention and the MLP on a residual stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor, nn

from armillary.attention import AttentionMask, TokenProjections
from armillary.core import SequenceLayout, compat, label
from armillary.models.layers.chunked import in_chunks
from armillary.models.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from armillary.models.activation_checkpoint.checkpoint import Checkpoint


class AttentionFunction(Protocol):
    """Attention of a layer: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D], with the layout of the T tokens.

    A method `projected`, which armillary's methods have, is called instead, with projections.
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
"""From hidden states [B, T, E] and the head's weight [V, E] to whatever the model is to return: logits, a loss."""


def unchanged(head: HeadFunction, tokens: int) -> HeadFunction:
    """Returns the head of a model whose vocabulary is not sharded."""
    return head


class Context:
    """The tokens of a forward pass, for all blocks: their number, rotation, mask and layout.

    Not a dataclass: FSDP2 casts every tensor among a block's arguments to the compute dtype, and rebuilds dataclasses
    to reach those inside. Cosines in bfloat16 would blur positions.

    `below`, a list shared by all blocks, has the checkpoint of the block before this one, if it has one.
    """

    def __init__(
        self, tokens: int, rotation: RotaryEmbedding | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> None:
        self.tokens, self.rotation, self.mask, self.layout = tokens, rotation, mask, layout
        self.below: list[ref[Checkpoint]] = []

    def seen_by(self, block: Any) -> Context:
        """Returns the context with a block's own mask. Built outside of the block, which torch.compile traces."""
        mask = block.visible(self.mask)
        if mask is self.mask:
            return self
        context = Context(self.tokens, self.rotation, mask, self.layout)
        context.below = self.below
        return context


class Block(nn.Module):
    """[B, T, E] -> [B, T, E]: attention, then the token-wise part (`rest`), both added to the residual stream.

    `run` computes the two: `run_plainly`, unless an activation checkpointing policy is set. `gathered_ranks` is the
    number of ranks whose tokens the norms before attention and MLP gather (tensor parallelism): attention and MLP see
    that many tokens for each token of the block's input.
    """

    run: Callable[[Block, Tensor, Context], Tensor]
    gathered_ranks: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.run = run_plainly

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.run(self, x, context)

    @property
    @abstractmethod
    def attention(self) -> AttentionFunction:
        """The layer's attention; can be set."""

    @attention.setter
    @abstractmethod
    def attention(self, attention: AttentionFunction) -> None: ...

    def visible(self, mask: AttentionMask) -> AttentionMask:
        """Returns the mask of this block: the model's, unless overridden."""
        return mask

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """Returns x, normed for the projections."""

    @abstractmethod
    def projections(self, context: Context, normed: bool) -> TokenProjections:
        """Returns the projections from x to q, k and v; from `normed` x, or from x itself."""

    @abstractmethod
    def rest(self, x: Tensor, out: Tensor) -> Tensor:
        """Computes the token-wise part behind attention, from x [B, T, E] and out [B, T, H, D]."""


def attend(block: Block, x: Tensor, context: Context) -> Tensor:
    """Computes attention, out [B, T, H, D], under autograd."""
    projections, x = block.projections(context, normed=True), block.norm(x)
    x = x if block.gathered_ranks == 1 else x[:, : context.tokens]  # drops padding
    with label("attention"):
        if isinstance(block.attention, TakesProjections):
            return block.attention.projected(x, projections, mask=context.mask, layout=context.layout)
        q = projections.q(x, range(projections.heads))
        k, v = projections.kv(x, range(projections.key_heads))
        return block.attention(q, k, v, mask=context.mask, layout=context.layout)


def run_plainly(block: Block, x: Tensor, context: Context) -> Tensor:
    """Runs a block under autograd, which keeps every tensor that backward needs."""
    out = attend(block, x, context)
    with label("mlp"):
        return block.rest(x, out)


class Decoder(nn.Module):
    """Token ids [B, T] -> hidden states [B, T, E]: embedding, blocks, and a norm.

    With `norm_in_chunks` the final norm keeps only its input, and runs on `chunk` tokens at a time.
    """

    norm_in_chunks: bool = False
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
        x = self.embed(ids, positions)
        mask = AttentionMask(causal=True) if mask is None else mask
        context = Context(ids.shape[1], self.rotation(positions, x.dtype), mask, layout)
        for block in self.blocks:
            x = block(x, context.seen_by(block))
        norm = self.final_norm
        return in_chunks(norm, (x,), norm, self.chunk) if self.norm_in_chunks else norm(x)

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the embeddings [B, T, E]."""

    @property
    @abstractmethod
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks, in order."""

    @property
    @abstractmethod
    def final_norm(self) -> nn.Module:
        """The norm behind the last block."""

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> RotaryEmbedding | None:
        """Returns RoPE at these positions; None unless overridden."""
        return None


def checked_positions(ids: Tensor, positions: Tensor | None, layout: SequenceLayout | None) -> Tensor:
    """Returns the positions [T] or [B, T] on the device of `ids`.

    Raises:
        ValueError: positions that do not match the ids, or are missing on a shard.
    """
    if compat.is_dtensor(ids) or compat.is_dtensor(positions):
        raise ValueError("ids or positions are a DTensor here, which the whole model takes; pass local tensors")
    if ids.ndim != 2:
        raise ValueError(f"ids must be [B, T]; got {tuple(ids.shape)}")
    if positions is None and layout is not None and layout.shards > 1:
        raise ValueError(
            f"positions are needed where {layout.shards} shards hold the sequence: layout.positions(shard)"
        )
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device) if layout is None else layout.positions(0)
    if positions.shape not in (ids.shape, ids.shape[1:]) or positions.is_floating_point():
        shown = f"{tuple(positions.shape)} of {positions.dtype}"
        raise ValueError(
            f"positions must be {ids.shape[1]} integers, of each row or of all, for ids {tuple(ids.shape)}; got {shown}"
        )
    return positions.to(ids.device)
