"""Sharded cache of keys and values: each rank keeps those of its shard of the prompt.

    prompt     attention by the layer's method (Ring, Ulysses, ...); each rank keeps k and v of its own tokens
    one token  every rank has its q, k and v; one rank keeps k and v; each attends to its own keys, and the partial
               results are merged by log-sum-exp (`merge_partial_attention`)

The keys of a long prompt never move again, and each new token costs the same few bytes whatever the length.
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
from armillary.core.layout import Spans
from armillary.models.generation.decode_collectives import axes_of, merge_partial_attention


class CacheLayout:
    """The rank of each token: the prompt's by its layout, and each new one on the rank with the fewest tokens.

    All layers of a model share it. Every rank computes it without communication.

    Args:
        shards: ranks.
        shard: this rank.
        prompt: layout over all ranks; None: there are no tokens yet.
        new_tokens: upper bound of new tokens.
    """

    def __init__(self, shards: int, shard: int, prompt: SequenceLayout | None, new_tokens: int) -> None:
        self.shard, self.new_tokens = shard, new_tokens
        self.sizes = [0] * shards if prompt is None else list(prompt.sizes)
        self.length = sum(self.sizes)
        self.room = room(self.sizes, new_tokens)[shard]
        """Tokens that this rank will have at most."""
        self.owner: int | None = None
        """Who has the newest token."""
        self._prompt: Spans = () if prompt is None else prompt.spans(shard)
        self._since: list[range] = []

    @property
    def spans(self) -> Spans:
        """The positions of this rank's tokens, in the order of memory."""
        return (*self._prompt, *self._since)

    def add(self) -> None:
        """Adds one new token, at position `length`.

        Raises:
            ValueError: no room is left.
        """
        if self.new_tokens == 0:
            raise ValueError(f"there is room for {self.length} tokens, and all of it is taken; ask for more at first")
        self.owner = self.sizes.index(min(self.sizes))
        if self.owner == self.shard:
            self._since[-1:] = extended(self._since[-1:], self.length)
        self.sizes[self.owner] += 1
        self.length, self.new_tokens = self.length + 1, self.new_tokens - 1


def room(sizes: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """Returns the most tokens of each rank after `new_tokens` have gone, one by one, to the rank with the fewest."""
    level = min(-(-(total + new_tokens) // (i + 1)) for i, total in enumerate(accumulate(sorted(sizes))))
    return tuple(max(size, level) for size in sizes)


def extended(last: list[range], position: int) -> list[range]:
    """Returns a run (or none) and a later position, as one run if a step fits."""
    if not last:
        return [range(position, position + 1)]
    run, step = last[0], position - last[0][-1]
    if len(run) == 1 or run.step == step:
        return [range(run.start, position + 1, step)]
    return [run, range(position, position + 1)]


class CachedAttention:
    """A layer's attention with a cache: `method` over the prompt, then token by token over all cached keys.

    Called with a layout it gets the prompt, called without one the newest token of `holdings`, the same on every rank.
    It takes finished q, k, v only. Nothing in it has a gradient.

    Bytes sent for each token: at most (P - 1) B H (D e + 4), all-gather, however long the prompt.
    """

    def __init__(self, method: Method, holdings: CacheLayout) -> None:
        self.method, self.holdings = method, holdings
        self.axes = axes_of(method)
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        """q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]; T = 1 for a new token.

        Raises:
            ValueError: a mask under which new tokens would change earlier ones, or whose documents end before them.
        """
        check_mask(mask)
        if layout is None:
            return self._next(q, k, v, mask)
        out = self.method(q, k, v, mask=mask, layout=layout)
        self._keep(k, v, 0)
        return out

    def _next(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Computes one token's attention over the keys of all ranks: [B, 1, H, D]."""
        holdings = self.holdings
        if holdings.owner == holdings.shard:
            self._keep(k, v, holdings.sizes[holdings.shard] - 1)
        return merge_partial_attention(*self._over_held(q, v, mask), self.axes)

    def _over_held(self, q: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) over this rank's keys; 0 and -inf where it sees none of them."""
        newest = range(self.holdings.length - 1, self.holdings.length)
        inputs = replace(Inputs.of(q, v), single=True)
        q, kernel = contiguous_rows(q), choose_kernel(inputs, self.method.kernel)
        result, scores = Merge.of(q, v), Scores(q.shape[-1] ** -0.5)
        for tile in tiles((newest,), self.holdings.spans, mask):
            assert self.k is not None and self.v is not None  # whoever holds a token has been given it
            visible = slice(tile.k0, tile.k1)
            result.add(
                TilePart(ALL, ALL, ALL),
                *kernel.forward(q, self.k[:, visible], self.v[:, visible], tile.offsets, scores),
            )
        return result.result()

    def _keep(self, k: Tensor, v: Tensor, at: int) -> None:
        """Copies k and v [B, T, K, D] into the cache, from token `at` on."""
        if self.k is None or self.v is None:
            self.k, self.v = (x.new_empty((x.shape[0], self.holdings.room, *x.shape[2:])) for x in (k, v))
        self.k[:, at : at + k.shape[1]] = k
        self.v[:, at : at + v.shape[1]] = v


def check_mask(mask: AttentionMask) -> None:
    """Refuses masks that cannot be continued by new tokens."""
    if not mask.causal or mask.documents is not None or mask.pattern is not None:
        raise ValueError(f"{mask}: only causal masks, with or without a window, can be continued token by token")
