"""Decoding with a cache: one forward pass over the whole prompt, sharded or not, then one for each new token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method
from armillary.core import SequenceLayout
from armillary.core.validation import integer
from armillary.models.activation_checkpoint.policy import run_tiled
from armillary.models.block import AttentionFunction, Block, Context, run_plainly
from armillary.models.generation.cache import CachedAttention, CacheLayout, check_mask
from armillary.models.generation.decode_collectives import axes_of, broadcast_from_shard
from armillary.models.generation.state_cache import CachedStates
from armillary.models.layers.interleaved import all_gather_interleaved
from armillary.models.layers.state_mixers import StateMixer
from armillary.models.parallel.tensor import gathered_logits

BlockRunner = Callable[[Block, Tensor, Context], Tensor]
"""A value of `Block.run`."""


class Decoding:
    """A `Llama` or `GPT` with caches of keys and values, or of states, on the ranks of its attention method.

    The model has the caches only during `prompt` and `step`. Between these calls the model can be trained, or be used
    by another `Decoding`. All ranks of the method must make the same calls.

    Args:
        model: a plain model, or one on a mesh (`parallelize`).
        max_new_tokens: maximum number of tokens after the prompt. Memory is allocated for so many.
        mask: causal by default. May have a window, unless the model has layers with a state.
        completions: n, the number of completions of each prompt. They share the cache of the prompt.

    Raises:
        ValueError: max_new_tokens is below 0 or completions below 1, the model has no `Block`s, its attention is not
            an armillary method, its layers have methods that divide the sequence differently or unknown axes, new
            tokens cannot continue the mask, or the mask has a window and a layer has a state.
    """

    def __init__(
        self, model: nn.Module, *, max_new_tokens: int, mask: AttentionMask | None = None, completions: int = 1
    ) -> None:
        self.model, self.max_new_tokens = model, integer("max_new_tokens", max_new_tokens, 0)
        self.completions = integer("completions", completions, 1)
        self.mask = AttentionMask(causal=True) if mask is None else mask
        check_mask(self.mask)
        self.blocks = [module for module in model.modules() if isinstance(module, Block)]
        if self.mask.window is not None and any(isinstance(block.mixer, StateMixer) for block in self.blocks):
            raise ValueError(f"{self.mask}: layers with a state have no window; only causal masks are accepted")
        methods = methods_of(model, self.blocks)
        self.method = methods[0]
        self.axes = axes_of(self.method)
        self.start(None, max_new_tokens)

    def start(self, prompt: SequenceLayout | None, new_tokens: int) -> None:
        """Creates empty caches for `new_tokens` tokens, after a prompt of this layout over all ranks of the method."""
        self.cache_layout = CacheLayout(self.method.shards, self.method.shard, prompt, new_tokens)
        methods = methods_of(self.model, self.blocks)
        self.layers = [
            CachedStates(method)
            if isinstance(block.mixer, StateMixer)
            else CachedAttention(method, self.cache_layout, self.completions)
            for block, method in zip(self.blocks, methods, strict=True)
        ]

    def prompt(self, ids: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Runs the whole prompt. Returns logits [B, V] of its last token, on every rank.

        Each rank computes its own tokens, and attention runs by the layer's method. Only the last token's logits are
        computed.

        Args:
            ids: [B, N], the same on all ranks.
            layout: layout of the prompt over all ranks of the method, or over its sequence axis; by default
                `method.layout(N)`. If N is smaller than the number of ranks and no layout is given, the prompt is
                decoded token by token.

        Raises:
            ValueError: the layout has another length, or another number of shards.
        """
        layout = self.layout_for(ids, layout)
        if layout is None:
            return self._one_by_one(ids)
        self.start(layout, self.max_new_tokens)
        shard = self.method.shard
        with self._use_caches(partial(run_tiled, None)):
            return self.model(
                layout.take(ids, shard),
                positions=layout.positions(shard),
                mask=self.mask,
                layout=layout,
                head=partial(self._last_logits, *shard_and_index(layout, layout.length - 1)),
            )

    def step(self, token: Tensor) -> Tensor:
        """Runs the next token of each completion. Returns logits [B n, V] for the token after it, on every rank.

        Args:
            token: [B n], the same on all ranks. The n completions of a prompt are adjacent.

        Raises:
            ValueError: the cache is full.
        """
        position = torch.tensor([self.cache_layout.length], device=token.device)
        self.cache_layout.add()
        with self._use_caches(run_plainly):
            return self.model(token[:, None], positions=position, mask=self.mask)[:, 0]

    def broadcast_token(self, token: Tensor) -> Tensor:
        """Returns the first rank's token [B n] on every rank, because ranks may have chosen different tokens.

        Bytes sent: at most (P - 1) 8 B n, kind "all_gather".
        """
        shard = self.method.shard
        return broadcast_from_shard(token[:, None][:, : int(shard == 0)], 0, shard, self.axes)[:, 0]

    def layout_for(self, ids: Tensor, layout: SequenceLayout | None) -> SequenceLayout | None:
        """Returns the layout of a prompt [B, N] over all ranks, checked. None if none is given and N is below P."""
        length, shards = ids.shape[1], self.method.shards
        if layout is None:
            return self.method.layout(length) if length >= shards else None
        if layout.length != length or layout.shards not in (shards, self.method.sequence_shards):
            raise ValueError(
                f"{layout} does not fit a prompt of {length} tokens on {shards} ranks: attend.layout(length)"
            )
        return layout if layout.shards == shards else layout.refine(shards // layout.shards)

    def _one_by_one(self, ids: Tensor) -> Tensor:
        """Runs the tokens of a prompt [B, N] one by one, as new tokens. Returns logits [B, V] of the last one."""
        self.start(None, ids.shape[1] + self.max_new_tokens)
        # All n completions run the prompt's tokens, so the logits of a prompt's completions are equal.
        *earlier, last = ids.repeat_interleave(self.completions, 0).unbind(1)
        for token in earlier:
            self.step(token)
        return self.step(last)[:: self.completions]

    def _last_logits(
        self,
        owner: int,
        index: int,
        hidden: Tensor,
        weight: Tensor,
        axis: DeviceMesh | None = None,
        vocabulary: int = 0,
    ) -> Tensor:
        """Returns logits [B, V] of one token of the prompt on all ranks. The model's `head` of the prompt.

        Args:
            owner: index of the shard that has the token.
            index: index of the token in its shard.
            hidden: [B, T, E], the hidden states of this rank's shard. With a tensor-parallel axis of R ranks, this
                rank's interleaved tokens of them.
            weight: [V, E]; with an axis this rank's rows [V_r, E].
            axis, vocabulary: passed by `sharded_head` under tensor parallelism.
        """
        # `own_hidden` is [B, 1, E] on the owner's ranks, [B, 0, E] on others. Token i of a shard is token i // R of the
        # tensor-parallel rank i % R: the owner's R ranks gather their tokens i // R, and select number i % R.
        ranks = 1 if axis is None else axis.size()
        own_hidden = hidden[:, index // ranks :][:, :1] if owner == self.method.shard else hidden[:, :0]
        if axis is not None and owner == self.method.shard:
            own_hidden = all_gather_interleaved(own_hidden, axis)[:, index % ranks :][:, :1]
        last = broadcast_from_shard(own_hidden, owner, self.method.shard, self.axes)
        return (F.linear(last, weight) if axis is None else gathered_logits(last, weight, axis, vocabulary))[:, 0]

    @contextmanager
    def _use_caches(self, run: BlockRunner) -> Generator[None]:
        """Context manager for one forward pass: attention through the caches, no dropout, no gradients.

        Args:
            run: how blocks run meanwhile.
        """
        original = [(block.attention, block.run) for block in self.blocks]
        training_modules = [module for module in self.model.modules() if module.training]
        # `training` is set module by module: `model.train()` at the end would also set modules that were in eval mode.
        try:
            for module in training_modules:
                module.training = False
            for block, layer in zip(self.blocks, self.layers, strict=True):
                block.attention, block.run = cast(AttentionFunction, layer), run
            with torch.no_grad():
                yield
        finally:
            for block, (original_attention, original_run) in zip(self.blocks, original, strict=True):
                block.attention, block.run = original_attention, original_run
            for module in training_modules:
                module.training = True


def methods_of(model: nn.Module, blocks: Sequence[Block]) -> list[Method]:
    """Returns the attention method of each block.

    Raises:
        ValueError: there are no blocks, an attention is not a `Method`, or methods divide the sequence differently.
    """
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks of armillary's to generate with; give a Llama or a GPT")
    methods: list[Method] = []
    for block in blocks:
        if not isinstance(block.attention, Method):
            kind = type(block.attention).__name__
            raise ValueError(
                f"{kind} is not an armillary method, which tells the cache the tokens of each rank; use Local()"
            )
        methods.append(block.attention)
    first = methods[0]
    for method in methods:
        if (method.shards, method.shard, method.sequence_shards) != (first.shards, first.shard, first.sequence_shards):
            raise ValueError(f"layers divide the sequence differently: over {first.shards} and {method.shards} ranks")
    return methods


def shard_and_index(layout: SequenceLayout, position: int) -> tuple[int, int]:
    """Returns the shard that has a position, and the position's index among the shard's tokens."""
    for shard in range(layout.shards):
        span_start = 0  # index of the span's first token in the shard
        for span in layout.spans(shard):
            if position in span:
                return shard, span_start + span.index(position)
            span_start += len(span)
    raise ValueError(f"{layout} has no position {position}")
