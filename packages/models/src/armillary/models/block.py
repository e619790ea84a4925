"""What the blocks of all models have in common: attention, and what follows it, on a residual stream."""

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
    """What a layer calls: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]. `layout`: where the T tokens lie.

    If it has a method `projected` too, as armillary's have, that is called instead, with projections.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


@runtime_checkable
class TakesProjections(Protocol):
    """Attention that makes q, k and v itself, when it needs them."""

    def projected(
        self, x: Tensor, projections: TokenProjections, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor: ...


HeadFunction = Callable[..., Any]
"""From hidden states [B, T, E] and the head's weight [V, E] to whatever the model is to return: logits, a loss."""


def unchanged(head: HeadFunction, tokens: int) -> HeadFunction:
    """The head of a model that is whole."""
    return head


class Context:
    """What the blocks are told about their tokens: how many, the rotation of each, who sees whom, where they lie.

    Not a dataclass: FSDP2 casts every tensor among a block's arguments to the compute dtype, and rebuilds dataclasses
    to reach those inside. Cosines in bfloat16 would blur positions.

    `below`, one list for all blocks, has the checkpoint of the block before this one, if it has one.
    """

    def __init__(
        self, tokens: int, rotation: RotaryEmbedding | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> None:
        self.tokens, self.rotation, self.mask, self.layout = tokens, rotation, mask, layout
        self.below: list[ref[Checkpoint]] = []

    def seen_by(self, block: Any) -> Context:
        """The same for one block, with the mask that it has. Made here, where torch.compile does not trace it."""
        mask = block.visible(self.mask)
        if mask is self.mask:
            return self
        context = Context(self.tokens, self.rotation, mask, self.layout)
        context.below = self.below
        return context


class Block(nn.Module):
    """[B, T, E] -> [B, T, E]: attention, and then what follows it token by token, both added to the residual stream.

    `run` is how the two are done: `plainly`, unless an activation checkpointing policy is set. `gathered_ranks`: the
    ranks whose tokens the norms before attention and MLP gather (tensor parallelism): for each token that the block is
    given, attention and MLP have so many.
    """

    run: Callable[[Block, Tensor, Context], Tensor]
    gathered_ranks: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.run = plainly

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.run(self, x, context)

    @property
    @abstractmethod
    def attention(self) -> AttentionFunction:
        """What attends. May be set."""

    @attention.setter
    @abstractmethod
    def attention(self, attention: AttentionFunction) -> None: ...

    def visible(self, mask: AttentionMask) -> AttentionMask:
        """What this block sees of what the mask allows: all, unless overridden."""
        return mask

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """x normed, as projections want it."""

    @abstractmethod
    def projections(self, context: Context, normed: bool) -> TokenProjections:
        """From x to q, k and v: from x `normed` already, or from x as it is."""

    @abstractmethod
    def rest(self, x: Tensor, out: Tensor) -> Tensor:
        """What follows attention, token by token: from x [B, T, E] and out [B, T, H, D] to the block's result."""


def attend(block: Block, x: Tensor, context: Context) -> Tensor:
    """out [B, T, H, D], all of it differentiated by autograd."""
    projections, x = block.projections(context, normed=True), block.norm(x)
    x = x if block.gathered_ranks == 1 else x[:, : context.tokens]  # without what pads them
    with label("attention"):
        if isinstance(block.attention, TakesProjections):
            return block.attention.projected(x, projections, mask=context.mask, layout=context.layout)
        q = projections.q(x, range(projections.heads))
        k, v = projections.kv(x, range(projections.key_heads))
        return block.attention(q, k, v, mask=context.mask, layout=context.layout)


def plainly(block: Block, x: Tensor, context: Context) -> Tensor:
    """The block as autograd has it: everything that backward might want is kept."""
    out = attend(block, x, context)
    with label("mlp"):
        return block.rest(x, out)


class Decoder(nn.Module):
    """Token ids [B, T] -> hidden states [B, T, E]: embedding, blocks, and a norm.

    `norm_in_chunks`: the norm keeps its input alone, and is run on `chunk` tokens at once.
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
        """[B, T, E]"""

    @property
    @abstractmethod
    def blocks(self) -> Iterable[nn.Module]:
        """In the order in which they are run."""

    @property
    @abstractmethod
    def final_norm(self) -> nn.Module:
        """What the hidden states go through at the end."""

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> RotaryEmbedding | None:
        """RoPE at these positions; none, unless overridden."""
        return None


def checked_positions(ids: Tensor, positions: Tensor | None, layout: SequenceLayout | None) -> Tensor:
    """The positions [T] or [B, T] on the device of `ids`; refuses what does not match, and what cannot be known."""
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
