"""Decoding with a cache: one pass over the whole prompt, sharded or not, then one pass for each token."""

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
from armillary.models.activation_checkpoint.policy import run_tiled
from armillary.models.block import AttentionFunction, Block, Context, run_plainly
from armillary.models.generation.cache import CachedAttention, CacheLayout, check_mask
from armillary.models.generation.decode_collectives import axes_of, broadcast_from_shard
from armillary.models.generation.state_cache import CachedStates
from armillary.models.layers.interleaved import all_gather_interleaved
from armillary.models.layers.state_mixers import StateMixer
from armillary.models.parallel.tensor import gathered_logits

BlockRunner = Callable[[Block, Tensor, Context], Tensor]


class Decoding:
    """A `Llama` or `GPT` with a cache of keys and values, or of states, on the ranks of its attention's method.

    Between calls the model is unchanged: it may be trained, or decode another prompt. All ranks of the method must make
    the same calls.

    Args:
        model: plain, or on a mesh (`parallelize`).
        max_new_tokens: upper bound of tokens after the prompt, for which memory is allocated.
        mask: causal by default; may have a window, unless the model has layers with a state.
        completions: n, the number of completions of each prompt. They share the cache of the prompt.

    Raises:
        ValueError: a model without armillary's blocks, whose attention is not an armillary method, or whose layers
            have methods that divide the sequence differently; a mask that cannot be continued.
    """

    def __init__(
        self, model: nn.Module, *, max_new_tokens: int, mask: AttentionMask | None = None, completions: int = 1
    ) -> None:
        self.model, self.max_new_tokens, self.completions = model, max_new_tokens, completions
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
        """Creates empty caches for a prompt of this layout, over all ranks of the method, and for new tokens."""
        self.cache_layout = CacheLayout(self.method.shards, self.method.shard, prompt, new_tokens)
        methods = methods_of(self.model, self.blocks)
        self.layers = [
            CachedStates(method)
            if isinstance(block.mixer, StateMixer)
            else CachedAttention(method, self.cache_layout, self.completions)
            for block, method in zip(self.blocks, methods, strict=True)
        ]

    def prompt(self, ids: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Runs the whole prompt, ids [B, N]. Returns logits [B, V] of its last token. Both are equal on all ranks.

        Each rank computes its own tokens, and attention runs as in training. Only the last token's logits are computed.

        Args:
            layout: over all ranks of the method; `method.layout(N)` by default. With fewer tokens than ranks and no
                layout, they are decoded one by one.

        Raises:
            ValueError: a layout of another length, or over another number of ranks.
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
        """Runs the next token [B n]. Returns logits [B n, V] of the one after it. Both are equal on all ranks.

        The n completions of a prompt are adjacent.

        Raises:
            ValueError: no room is left.
        """
        position = torch.tensor([self.cache_layout.length], device=token.device)
        self.cache_layout.add()
        with self._use_caches(run_plainly):
            return self.model(token[:, None], positions=position, mask=self.mask)[:, 0]

    def broadcast_token(self, token: Tensor) -> Tensor:
        """Returns the first rank's token [B n] on every rank. Ranks that chose different tokens would diverge.

        Bytes sent: at most (P - 1) 8 B n, all-gather.
        """
        shard = self.method.shard
        return broadcast_from_shard(token[:, None][:, : int(shard == 0)], 0, shard, self.axes)[:, 0]

    def layout_for(self, ids: Tensor, layout: SequenceLayout | None) -> SequenceLayout | None:
        """Returns the layout of a prompt [B, N] over all ranks, checked; None for fewer tokens than ranks."""
        length, shards = ids.shape[1], self.method.shards
        if layout is None:
            return self.method.layout(length) if length >= shards else None
        if layout.length != length or layout.shards not in (shards, self.method.sequence_shards):
            raise ValueError(
                f"{layout} does not fit a prompt of {length} tokens on {shards} ranks: attend.layout(length)"
            )
        return layout if layout.shards == shards else layout.refine(shards // layout.shards)

    def _one_by_one(self, ids: Tensor) -> Tensor:
        self.start(None, ids.shape[1] + self.max_new_tokens)
        # The completions of a prompt run its tokens together, as new tokens, and so have equal logits.
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
        """Returns logits [B, V] of the token that rank `owner` has at `index` of its hidden states [B, T, E].

        With a tensor-parallel `axis`, hidden states are interleaved over it, and the weight has this rank's rows of V.
        """
        # `own_hidden` is [B, 1, E] on the owner, [B, 0, E] on other ranks. With tokens interleaved over R ranks, i is
        # token i // R of rank i % R: the owner gathers that token of all ranks, and selects one.
        ranks = 1 if axis is None else axis.size()
        own_hidden = hidden[:, index // ranks :][:, :1] if owner == self.method.shard else hidden[:, :0]
        if axis is not None and owner == self.method.shard:
            own_hidden = all_gather_interleaved(own_hidden, axis)[:, index % ranks :][:, :1]
        last = broadcast_from_shard(own_hidden, owner, self.method.shard, self.axes)
        return (F.linear(last, weight) if axis is None else gathered_logits(last, weight, axis, vocabulary))[:, 0]

    @contextmanager
    def _use_caches(self, run: BlockRunner) -> Generator[None]:
        """Context manager for one forward pass: attention through the caches, no dropout, no gradients."""
        original = [(block.attention, block.run) for block in self.blocks]
        training = [module for module in self.model.modules() if module.training]
        # Flags are set one by one, since `model.eval()` and `train()` would lose those of single modules.
        try:
            for module in training:
                module.training = False
            for block, layer in zip(self.blocks, self.layers, strict=True):
                block.attention, block.run = cast(AttentionFunction, layer), run
            with torch.no_grad():
                yield
        finally:
            for block, (attention, usual_run) in zip(self.blocks, original, strict=True):
                block.attention, block.run = attention, usual_run
            for module in training:
                module.training = True


def methods_of(model: nn.Module, blocks: Sequence[Block]) -> list[Method]:
    """Returns the method of each block, checked."""
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
    """Returns (shard, index among its tokens) of a position."""
    for shard in range(layout.shards):
        first = 0
        for span in layout.spans(shard):
            if position in span:
                return shard, first + span.index(position)
            first += len(span)
    raise ValueError(f"{layout} has no position {position}")
