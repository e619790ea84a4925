"""Sharded cache of keys and values for decoding: each rank caches k and v of its shard of the prompt.

    prompt     attention runs by the layer's method (Ring, Ulysses, ...); each rank caches k and v of its own tokens
    new token  every rank computes the token's q, k and v; one rank caches k and v; each rank attends to the keys in its
               own cache, and the partial results are merged by log-sum-exp (`merge_partial_attention`)

The prompt's keys are not sent again, and the bytes sent for a new token do not depend on the length. The n completions
of a prompt share its keys. B prompts have B n rows of new tokens; the n rows of a prompt are adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from armillary.attention import AttentionMask, Method
from armillary.attention.kernels import Inputs, Scores, choose_kernel, contiguous_rows
from armillary.attention.tiling.merge import ALL, Merge, TilePart
from armillary.attention.tiling.tiles import tiles
from armillary.core import SequenceLayout
from armillary.core.spans import Spans
from armillary.models.generation.decode_collectives import axes_of, merge_partial_attention


class CacheLayout:
    """The rank that caches each token: by the layout for the prompt, the rank with the fewest tokens for each new one.

    All layers of a model share one `CacheLayout`. Every rank computes the same one, without communication.

    Args:
        shards: number of ranks.
        shard: index of this rank's shard.
        prompt: layout of the prompt over all ranks; None for an empty cache.
        new_tokens: maximum number of new tokens. The attribute counts those that can still be added.
    """

    def __init__(self, shards: int, shard: int, prompt: SequenceLayout | None, new_tokens: int) -> None:
        self.shard, self.new_tokens = shard, new_tokens
        self.sizes = [0] * shards if prompt is None else list(prompt.sizes)
        """Number of cached tokens of each rank."""
        self.length = sum(self.sizes)
        self.new_capacity = sizes_after(self.sizes, new_tokens)[shard] - self.sizes[shard]
        """Maximum number of new tokens on this rank."""
        self.owner: int | None = None
        """The rank that has the newest token."""
        self.prompt_spans: Spans = () if prompt is None else prompt.spans(shard)
        """The positions of this rank's tokens of the prompt, in their order in the cache."""
        self._new_runs: list[range] = []

    @property
    def new_spans(self) -> Spans:
        """The positions of this rank's new tokens, in their order in the cache."""
        return tuple(self._new_runs)

    def add(self) -> None:
        """Adds one new token, at position `length`.

        Raises:
            ValueError: the cache is full.
        """
        if self.new_tokens == 0:
            raise ValueError(f"the cache has room for {self.length} tokens and is full; give a larger max_new_tokens")
        self.owner = self.sizes.index(min(self.sizes))  # the first rank of those with the fewest tokens
        if self.owner == self.shard:
            self._new_runs[-1:] = extend_run(self._new_runs[-1:], self.length)
        self.sizes[self.owner] += 1
        self.length, self.new_tokens = self.length + 1, self.new_tokens - 1


def sizes_after(sizes: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """Returns each rank's maximum number of tokens after `new_tokens` are added, each to the rank with the fewest."""
    # The ranks with the fewest tokens are filled up to a common level; ranks above the level keep their size. If the
    # i + 1 smallest ranks are filled, the level is their tokens and the new ones, divided by i + 1 and rounded up. The
    # right number of ranks gives the lowest level.
    level = min(-(-(total + new_tokens) // (i + 1)) for i, total in enumerate(accumulate(sorted(sizes))))
    return tuple(max(size, level) for size in sizes)


def extend_run(last_run: list[range], position: int) -> list[range]:
    """Adds a position after the last run of positions.

    Args:
        last_run: the last run, or an empty list.
        position: a position after it.

    Returns:
        The run with the position, or the run and a new one if the position does not continue the run's step.
    """
    if not last_run:
        return [range(position, position + 1)]
    run, step = last_run[0], position - last_run[0][-1]
    if len(run) == 1 or run.step == step:
        return [range(run.start, position + 1, step)]
    return [run, range(position, position + 1)]


class CachedAttention:
    """A layer's attention with a cache: by `method` for the prompt, then over all cached keys for each new token.

    A call with a layout is for the prompt: q, k and v of this rank's tokens. A call without a layout is for the newest
    token of `cache_layout`: q, k and v are equal on all ranks. It has no gradient, and no `projected`.

    Bytes of the cache on a rank with T tokens of the prompt and room for R new ones: 2 (B T + B n R) K D e.

    Bytes sent for each new token, kind "all_gather", for any length of the prompt: at most (P - 1) B n H (D e + 4) (8
    instead of 4 in float64).

    Args:
        method: the layer's method.
        completions: n, the number of completions of each prompt.
    """

    def __init__(self, method: Method, cache_layout: CacheLayout, completions: int = 1) -> None:
        self.method, self.cache_layout, self.completions = method, cache_layout, completions
        self.axes = axes_of(method)
        self.prompt: tuple[Tensor, Tensor] | None = None
        """k and v [B, T, K, D] of this rank's tokens of the prompt."""
        self.new: tuple[Tensor, Tensor] | None = None
        """k and v [B n, R, K, D], with room for the new tokens of this rank."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        """Computes attention, q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]. For a new token, [B n, 1, ...].

        Raises:
            ValueError: the mask cannot be continued by new tokens (`check_mask`).
        """
        check_mask(mask)
        if layout is None:
            return self._next(q, k, v, mask)
        out = self.method(q, k, v, mask=mask, layout=layout)
        self.prompt = k.clone(), v.clone()  # copies, because views would keep a larger tensor alive
        return out

    def _next(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Computes one token's attention over the keys of all ranks: [B n, 1, H, D]."""
        # 1. The owner of the token appends its k and v.
        cache_layout = self.cache_layout
        if cache_layout.owner == cache_layout.shard:
            if self.new is None:
                rows, _, *head_sizes = k.shape
                self.new = (
                    k.new_empty((rows, cache_layout.new_capacity, *head_sizes)),
                    v.new_empty((rows, cache_layout.new_capacity, *v.shape[2:])),
                )
            last = sum(map(len, cache_layout.new_spans)) - 1
            self.new[0][:, last], self.new[1][:, last] = k[:, 0], v[:, 0]
        # 2. Every rank attends to its own keys: those of the prompt, then those of new tokens. The n completions of a
        # prompt are n queries [B, n, H, D] of one call over its keys.
        merge = Merge.of(q, v)
        completion_queries = q.reshape(-1, self.completions, *q.shape[2:])
        self._attend(merge, completion_queries, self.prompt, cache_layout.prompt_spans, mask)
        self._attend(merge, q, self.new, cache_layout.new_spans, mask)
        # 3. Partial results of all ranks are merged by their log-sum-exp.
        return merge_partial_attention(*merge.result(), self.axes)

    def _attend(
        self, merge: Merge, q: Tensor, cache: tuple[Tensor, Tensor] | None, spans: Spans, mask: AttentionMask
    ) -> None:
        """Adds the newest position's attention over some of this rank's keys to `merge`.

        Args:
            q: queries of the newest position.
            cache: k and v, at the positions `spans`; None if there are none.
        """
        newest = range(self.cache_layout.length - 1, self.cache_layout.length)
        for tile in tiles((newest,), spans, mask):
            assert cache is not None  # the owner of a token has its keys
            k, v = (x[:, tile.k0 : tile.k1] for x in cache)
            kernel = choose_kernel(replace(Inputs.of(q, v), single=q.shape[1] == 1), self.method.kernel)
            # A tile of one query position is a full rectangle, without a band. All n queries have the newest position,
            # so the tile holds for each of them.
            out, lse = kernel.forward(contiguous_rows(q), k, v, (None, None), Scores(q.shape[-1] ** -0.5))
            merge.add(TilePart(ALL, ALL, ALL), out.reshape(merge.shape), lse.reshape(merge.shape[:3]))


def check_mask(mask: AttentionMask) -> None:
    """Raises ValueError for masks that new tokens cannot continue.

    Under a mask that is not causal, a new token would change the outputs of earlier ones. Documents and patterns end
    with the prompt.
    """
    if not mask.causal or mask.documents is not None or mask.pattern is not None:
        raise ValueError(f"{mask}: only causal masks, with or without a window, can be continued token by token")
