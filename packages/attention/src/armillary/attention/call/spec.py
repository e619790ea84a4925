"""An attention method and its call: the caller's options, the checked call, and the functions that a method defines.

A method is a pair of plain functions, forward and backward, over local tensors. `call/` runs it through
`AttentionMethod`; `Method` in `methods/base.py` adds the public `__call__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NotRequired, Self, TypedDict, cast

from torch import Tensor

from armillary.attention.call.qkv_sources import QKVSource
from armillary.attention.kernels import Kernel, Scores
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.attention_mask import BoundedCache
from armillary.attention.tiling.block_attention import BlockAttention, Shards, head_runs, kernel_calls
from armillary.attention.tiling.grid import CachesDerived, Grid, grid_of
from armillary.attention.tiling.latents import Expansion, TokenSizes
from armillary.core import Axis, SequenceLayout, TokenRanges
from armillary.core.internal import register


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
    expansion: NotRequired[Tensor | None]
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


# -- methods -----------------------------------------------------------------------------------------------------------


class AttentionMethod(ABC):
    """Exact attention over a sequence that is sharded over the ranks of the method's mesh axes.

    Required: `shards`, `shard`, `sequence_shards`, `forward` and `backward`.
    """

    shards: int
    """Number of ranks that the sequence is sharded over."""
    shard: int
    """Index of this rank's shard."""
    sequence_shards: int
    """Ranks on the sequence axis or axes (P). Fewer than `shards` if a head axis divides the shards further."""
    redistributes_inputs: bool = False
    """True if `forward` saves other tensors than q, k, v, out and lse of this rank's own tokens."""
    projects_in_stages: bool = False
    """True for a `StagedMethod`, which projects q, k and v a few heads at a time, and again in backward."""
    fits_inside_ring: bool = False
    """True if the method can be the `inner` of a `Ring`: `forward` and `backward` take any `PartialLayout`."""
    takes_latents: bool = False
    """True if `forward` and `backward` take an `Expansion`. For other methods keys are expanded before the call."""
    saves_own_latents: bool = False
    """True if `forward` saves the latents that it was given, although `redistributes_inputs`."""
    sends_keys: bool = True
    """False if keys stay on their ranks."""
    send_latents: bool | None = None
    """True sends latents, False expanded keys; None sends what has fewer bytes (`latents_pay`)."""
    head_axis: Axis | None = None
    """The axis that divides the heads, if there is one."""
    flat_axis: Axis | None = None
    """One axis over all ranks, created for layers with a state on first use (`context_parallel.communication`)."""
    kernel: str | Kernel | None = None
    """Kernel, or its name, for calls without `kernel`; None: the preferred one of those that support the inputs."""

    was_called: bool = False
    """True once a call was checked, in eager mode or when a graph runs. A batch's `with` block resets it."""

    registered_id: int
    """Number under which a compiled graph finds the method (`armillary.core.graph_ops`)."""
    spec_cache: BoundedCache[tuple[tuple[Hashable, ...], AttentionOptions], AttentionSpec]
    """Specs of checked calls, by `call_properties` and options."""
    planned_specs: BoundedCache[tuple[Hashable, ...], AttentionSpec]
    """Specs that `plan_ahead` prepared, by their values."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        method = super().__new__(cls)
        method.registered_id, method.spec_cache, method.planned_specs = register(method), BoundedCache(), BoundedCache()
        return method

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy: without the registered id and the caches, which the copy makes itself."""
        dropped_names = ("registered_id", "spec_cache", "planned_specs")
        return {name: value for name, value in vars(self).items() if name not in dropped_names}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Mesh axes of the method, outermost first: the axes of its `inner` method, then its own `axis`."""
        inner: AttentionMethod | None = getattr(self, "inner", None)
        axis: Axis | None = getattr(self, "axis", None)
        return (() if inner is None else inner.axes) + (() if axis is None else (axis,))

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Saved]:
        """Returns out [B, T, H, Dv] for the local queries, and the tensors saved for `backward`.

        Args:
            expansion: of k and v, if these are rotary keys and latents (`tiling/latents.py`). Passed only to methods
                with `takes_latents`; others need not have it.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, saved: Saved, spec: AttentionSpec, expansion: Expansion | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv) of the local tokens, from dout [B, T, H, Dv].

        They are in the dtype of dout or a wider one, and share no memory with dout or the saved tensors.
        """

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:  # noqa: B027 - most methods take any shapes
        """Raises ValueError for shapes that the method does not support. Runs before any communication."""

    def plan(self, spec: AttentionSpec, previous: AttentionSpec, rows: int) -> None:  # noqa: B027 - nothing to prepare
        """Computes on the host the tiles and sends that `forward` and `backward` need for `spec`. May run in a thread.

        Args:
            spec: the spec of later calls, which find the computed values in its cache.
            previous: the spec of an earlier call. It tells whether the method rotated keys, queries or both.
            rows: number of rows of the batch.
        """

    def prefetch_queries(self, q: Tensor, key_heads: tuple[int, ...], layout: SequenceLayout) -> Any:
        """Starts to send q before the keys are projected, and returns a function that waits for the transfer.

        The result is passed to `forward_prefetched`. By default nothing is sent, and the result is None.

        Args:
            key_heads, layout: as in `AttentionSpec`.
        """
        return None

    def forward_prefetched(
        self, queries: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, expansion: Expansion | None = None, /
    ) -> tuple[Tensor, Saved]:
        """Runs `forward` after `prefetch_queries`.

        Args:
            queries: the result of `prefetch_queries`.
        """
        return self.forward(q, k, v, spec) if expansion is None else self.forward(q, k, v, spec, expansion)

    def latents_pay(self, key_heads: tuple[int, ...], sizes: TokenSizes) -> bool:
        """Returns True if the method sends fewer bytes with latents than with expanded keys. Equal on every rank.

        Args:
            key_heads: as in `AttentionSpec`.
        """
        return self.sends_keys and len(set(key_heads)) * sizes.head > sizes.sent

    def gathering(self, devices: Axis) -> AttentionMethod | None:
        """Returns the same method for latents of which each rank of `devices`, the axis of an outer method, has some.

        None: the outer method gathers them first.
        """
        return None

    def sends_latents(self, key_heads: tuple[int, ...], sizes: TokenSizes) -> bool:
        """Returns True if the method sends latents: `send_latents`, or by default if they pay."""
        choice = self.latents_pay(key_heads, sizes) if self.send_latents is None else self.send_latents
        return self.takes_latents and choice

    def heads(self, heads: range) -> range:
        """Returns the query heads that this rank attends with: all, unless a head axis divides them."""
        return heads

    def local_lse(self, saved: Saved, spec: AttentionSpec) -> Tensor:
        """Returns lse [B, T, H] of the local queries."""
        return saved.lse

    def empty_saved(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_heads: tuple[int, ...],
        tokens: int,
        key_tokens: int,
        expansion: Expansion | None = None,
    ) -> Saved:
        """Returns empty tensors shaped like those that `forward` saves. Required if `redistributes_inputs`.

        Args:
            key_heads: as in `AttentionSpec`.
            tokens, key_tokens: numbers of queries and of keys of this rank's sequence shard; symbols while
                torch.compile traces a graph.
        """
        raise TypeError(f"{type(self).__name__} has redistributes_inputs=True, so it must define empty_saved")


class StagedMethod(AttentionMethod):
    """A method that projects q, k and v a few heads at a time (UPipe), and then saves only x, out and lse."""

    projects_in_stages = True

    @abstractmethod
    def attend(
        self,
        source: QKVSource,
        spec: AttentionSpec,
        out_buffer: Tensor | None = None,
        expansion: Expansion | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns out [B, T, H, Dv] of the local tokens, and lse [B, n, h].

        lse is of the h heads that this rank attends with, and of the n tokens of its sequence shard.
        """

    @abstractmethod
    def differentiate(
        self,
        dout: Tensor,
        source: QKVSource,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        expansion: Expansion | None = None,
    ) -> None:
        """Adds the gradients of q, k and v to `source`, from dout [B, T, H, Dv] and the results of `attend`."""

    @abstractmethod
    def lse_to_seq(self, lse: Tensor, spec: AttentionSpec) -> Tensor:
        """Returns lse [B, T, H] of the local tokens from lse [B, n, h] of this rank's heads."""

    @abstractmethod
    def own_queries(self, spec: AttentionSpec) -> slice:
        """Returns the query heads that this rank attends with."""

    @abstractmethod
    def empty_results(
        self,
        shape: Sequence[int],
        shard_tokens: int,
        key_heads: tuple[int, ...],
        q: Tensor,
        value_dim: int,
        out_buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns empty tensors shaped like the results of `attend`, for q [..., D] and values of head dim Dv.

        Args:
            shape: B and T of this rank's tokens.
            shard_tokens: number of tokens of its sequence shard; a symbol while torch.compile traces a graph.
            key_heads: as in `AttentionSpec`.
        """
