"""Sharded cache of keys and values for decoding: each rank keeps the keys and values of its shard of the prompt.

    prompt     attention by the layer's method (Ring, Ulysses, ...); each rank keeps k and v of its own tokens
    one token  every rank has its q, k and v; one rank keeps k and v; each attends to its own keys, and the partial
               results are merged by log-sum-exp (`merge_partial_attention`)

The keys of a prompt are never sent again, and the bytes sent for a new token do not depend on the length. The n
completions of a prompt share its keys: B rows of prompts have B n rows of new tokens, those of a prompt adjacent.
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
    """The rank of each cached token: the prompt's by its layout, each new one on the rank with the fewest tokens.

    All layers of a model share it. Every rank computes the same without communication.

    Args:
        shards: number of ranks.
        shard: index of this rank's shard.
        prompt: layout of the prompt over all ranks; None for an empty cache.
        new_tokens: upper bound of new tokens.
    """

    def __init__(self, shards: int, shard: int, prompt: SequenceLayout | None, new_tokens: int) -> None:
        self.shard, self.new_tokens = shard, new_tokens
        self.sizes = [0] * shards if prompt is None else list(prompt.sizes)
        self.length = sum(self.sizes)
        self.new_capacity = sizes_after(self.sizes, new_tokens)[shard] - self.sizes[shard]
        """Maximum number of new tokens on this rank."""
        self.owner: int | None = None
        """The rank that has the newest token."""
        self.prompt_spans: Spans = () if prompt is None else prompt.spans(shard)
        """The positions of this rank's tokens of the prompt, in the order of memory."""
        self._new_runs: list[range] = []

    @property
    def new_spans(self) -> Spans:
        """The positions of this rank's new tokens, in the order of memory."""
        return tuple(self._new_runs)

    def add(self) -> None:
        """Adds one new token, at position `length`.

        Raises:
            ValueError: no room is left.
        """
        if self.new_tokens == 0:
            raise ValueError(f"the cache has room for {self.length} tokens and is full; give a larger max_new_tokens")
        self.owner = self.sizes.index(min(self.sizes))  # the first rank with the fewest tokens, alike on all ranks
        if self.owner == self.shard:
            self._new_runs[-1:] = extend_run(self._new_runs[-1:], self.length)
        self.sizes[self.owner] += 1
        self.length, self.new_tokens = self.length + 1, self.new_tokens - 1


def sizes_after(sizes: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """Returns the maximum number of tokens of each rank after `new_tokens` more, each on the rank with the fewest."""
    # The ranks with the fewest tokens are filled up to one level, rounded up; other ranks keep their size.
    level = min(-(-(total + new_tokens) // (i + 1)) for i, total in enumerate(accumulate(sorted(sizes))))
    return tuple(max(size, level) for size in sizes)


def extend_run(last: list[range], position: int) -> list[range]:
    """Appends a later position to a run, or to an empty list. Returns two runs if they have no common step."""
    if not last:
        return [range(position, position + 1)]
    run, step = last[0], position - last[0][-1]
    if len(run) == 1 or run.step == step:
        return [range(run.start, position + 1, step)]
    return [run, range(position, position + 1)]


class CachedAttention:
    """A layer's attention with a cache: `method` over the prompt, then token by token over all cached keys.

    A call with a layout gets the prompt; one without gets the newest token of `cache_layout`, equal on all ranks.
    It takes finished q, k and v only, and has no gradient.

    Bytes of the cache on a rank with T tokens of the prompt and room for R new ones: 2 (B T + B n R) K D e.

    Bytes sent for each token: at most (P - 1) B n H (D e + 4), all-gather, however long the prompt.
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
        """q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]; for a new token [B n, 1, ...].

        Raises:
            ValueError: a mask under which new tokens would change earlier ones, or whose documents end before them.
        """
        check_mask(mask)
        if layout is None:
            return self._next(q, k, v, mask)
        out = self.method(q, k, v, mask=mask, layout=layout)
        self.prompt = k.clone(), v.clone()  # as views they would keep a larger tensor alive
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
        # 2. Every rank attends to its own keys: of the prompt, then of new tokens. The n completions of a prompt are n
        # queries [B, n, H, D] of one call over its keys.
        result = Merge.of(q, v)
        completion_queries = q.reshape(-1, self.completions, *q.shape[2:])
        self._attend(result, completion_queries, self.prompt, cache_layout.prompt_spans, mask)
        self._attend(result, q, self.new, cache_layout.new_spans, mask)
        # 3. Partial results of all ranks are merged by their log-sum-exp.
        return merge_partial_attention(*result.result(), self.axes)

    def _attend(
        self, result: Merge, q: Tensor, cache: tuple[Tensor, Tensor] | None, spans: Spans, mask: AttentionMask
    ) -> None:
        """Merges attention of the newest position's queries over the cached keys of `spans` into `result`."""
        newest = range(self.cache_layout.length - 1, self.cache_layout.length)
        for tile in tiles((newest,), spans, mask):
            assert cache is not None  # the owner of a token has its keys
            k, v = (x[:, tile.k0 : tile.k1] for x in cache)
            kernel = choose_kernel(replace(Inputs.of(q, v), single=q.shape[1] == 1), self.method.kernel)
            # A tile of one row is a full rectangle. All n queries of q have the newest position, so it is the tile of
            # each of them, and no mask is needed.
            out, lse = kernel.forward(contiguous_rows(q), k, v, (None, None), Scores(q.shape[-1] ** -0.5))
            result.add(TilePart(ALL, ALL, ALL), out.reshape(result.shape), lse.reshape(result.shape[:3]))


def check_mask(mask: AttentionMask) -> None:
    """Raises ValueError for masks that cannot be continued by new tokens."""
    if not mask.causal or mask.documents is not None or mask.pattern is not None:
        raise ValueError(f"{mask}: only causal masks, with or without a window, can be continued token by token")
