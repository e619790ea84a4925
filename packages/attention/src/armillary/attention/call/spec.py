"""The values of one attention call: the caller's options, the checked call, and the tensors saved for backward."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, NotRequired, TypedDict, cast

from torch import Tensor

from armillary.attention.kernels import Kernel, Scores
from armillary.attention.mask import AttentionMask
from armillary.attention.tiling.block import BlockAttention, Shards, head_runs, kernel_calls
from armillary.attention.tiling.grid import CachesDerived, Grid, grid_of
from armillary.core import SequenceLayout, TokenRanges


class Saved(NamedTuple):
    """The tensors saved for the backward of a method: q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out [B, T, H,
    Dv] and lse [B, T, H] over all keys.

    If the method redistributes its inputs, these are the inner method's tensors: Ulysses saves head shards.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class AttentionOptions(NamedTuple):
    """The keyword arguments of `Method.__call__` that are not tensors."""

    mask: AttentionMask
    layout: SequenceLayout | None = None
    key_layout: SequenceLayout | None = None
    scale: float | None = None
    softcap: float | None = None
    kernel: str | Kernel | None = None
    return_lse: bool = False


class ProjectedArguments(TypedDict):
    """The keyword arguments of `Method.projected` except `sinks`."""

    mask: AttentionMask
    layout: NotRequired[SequenceLayout | None]
    scale: NotRequired[float | None]
    softcap: NotRequired[float | None]
    kernel: NotRequired[str | Kernel | None]


class CallArguments(ProjectedArguments):
    """The keyword arguments of `Method.__call__` except `return_lse`."""

    key_layout: NotRequired[SequenceLayout | None]
    sinks: NotRequired[Tensor | None]


@dataclass(frozen=True, eq=False)
class AttentionSpec(CachesDerived):
    """One checked attention call. It is equal on every rank of a method, except for `key_heads`.

    Equal calls share one spec, and with it all values computed from it (`cached`).

    Args:
        mask: mask in global positions.
        layout: layout of the queries over the sequence axis; of one shard if there is no sequence axis.
        key_layout: layout of the keys and values, with as many shards; the same as `layout` except in cross-attention.
        scores: scale and softcap, which turn dot products into scores.
        key_heads: for each local query head, the local key/value head that it uses.
        kernel: computes the tiles.
    """

    mask: AttentionMask
    layout: SequenceLayout
    key_layout: SequenceLayout
    scores: Scores
    key_heads: tuple[int, ...]
    kernel: Kernel
    _derived: dict[Hashable, object] = field(default_factory=dict[Hashable, object], init=False, repr=False)

    @property
    def values(self) -> tuple[Hashable, ...]:
        """The arguments, to compare specs by value."""
        return self.mask, self.layout, self.key_layout, self.scores, self.key_heads, self.kernel

    @cached_property
    def grid(self) -> Grid:
        """The visible pairs of each query shard and key shard."""
        return grid_of(self.layout, self.key_layout, self.mask)

    def with_heads(self, key_heads: tuple[int, ...]) -> AttentionSpec:
        """Returns the spec of a call with these heads only, for an inner method. Cached."""
        return self.cached(("heads", key_heads), lambda: replace(self, key_heads=key_heads))

    def block(
        self, query: int, key: int, queries: TokenRanges | None = None, keys: TokenRanges | None = None
    ) -> BlockAttention:
        """Returns the kernel calls of query shard `query` against key shard `key`.

        Args:
            queries, keys: the tokens of the shard that the packed tensors contain; None if they contain all of them.
        """
        # Not by `cached`, which needs a closure: every step of a ring comes here.
        block_key = (query, key, queries, keys)
        if (block := self._derived.get(block_key)) is None:
            calls = kernel_calls(self.grid, self.kernel, head_runs(self.key_heads), *block_key)
            block = self._derived[block_key] = BlockAttention(
                query, key, self.kernel, self.scores.with_positive_scale, self.scores.sign, tuple(calls)
            )
        return cast(BlockAttention, block)

    def plan_block(
        self, rows: int, query: int, key: int, queries: TokenRanges | None = None, keys: TokenRanges | None = None
    ) -> None:
        """Computes the kernel calls of `block`, with packs for a batch of `rows` rows, before a call needs them."""
        block = self.block(query, key, queries, keys)
        query_count = self.layout.sizes[query] if queries is None else queries.count
        key_count = self.key_layout.sizes[key] if keys is None else keys.count
        if block.calls and rows:
            block.packed_calls(Shards(rows, query_count, key_count))


@lru_cache(maxsize=256)
def key_heads_of(heads: int, key_heads: int) -> tuple[int, ...]:
    """Returns the key/value head of each of H query heads: h // (H / K) for query head h, with K key/value heads."""
    return tuple(h * key_heads // heads for h in range(heads))
