"""The interface of attention methods: a pair of plain functions, forward and backward, over local tensors.

`call/` runs methods through this interface. `Method` in `methods/base.py` adds the public `__call__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Self

from torch import Tensor

from armillary.attention.call.sources import QKVSource
from armillary.attention.call.spec import AttentionOptions, AttentionSpec, Saved
from armillary.attention.kernels import Kernel
from armillary.attention.mask.attention_mask import BoundedCache
from armillary.core import Axis, SequenceLayout
from armillary.core.parts import register


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
    head_axis: Axis | None = None
    """The axis that divides the heads, if there is one."""
    flat_axis: Axis | None = None
    """One axis over all ranks, created for layers with a state on first use (`context_parallel.communication`)."""
    kernel: str | Kernel | None = None
    """Kernel, or its name, for calls without `kernel`; None: the preferred one of those that support the inputs."""

    registered_id: int
    """Number under which a compiled graph finds the method (`armillary.core.ops`)."""
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
    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Saved]:
        """Returns out [B, T, H, Dv] for the local queries, and the tensors saved for `backward`."""

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
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
        self, queries: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /
    ) -> tuple[Tensor, Saved]:
        """Runs `forward` after `prefetch_queries`.

        Args:
            queries: the result of `prefetch_queries`.
        """
        return self.forward(q, k, v, spec)

    def heads(self, heads: range) -> range:
        """Returns the query heads that this rank attends with: all, unless a head axis divides them."""
        return heads

    def local_lse(self, saved: Saved, spec: AttentionSpec) -> Tensor:
        """Returns lse [B, T, H] of the local queries."""
        return saved.lse

    def empty_saved(
        self, q: Tensor, k: Tensor, v: Tensor, key_heads: tuple[int, ...], tokens: int, key_tokens: int
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
    def attend(self, source: QKVSource, spec: AttentionSpec, out_buffer: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns out [B, T, H, Dv] of the local tokens, and lse [B, n, h].

        lse is of the h heads that this rank attends with, and of the n tokens of its sequence shard.
        """

    @abstractmethod
    def differentiate(self, dout: Tensor, source: QKVSource, out: Tensor, lse: Tensor, spec: AttentionSpec) -> None:
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
        v: Tensor,
        out_buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns empty tensors shaped like the results of `attend`, for q [..., D] and v [..., Dv].

        Args:
            shape: B and T of this rank's tokens.
            shard_tokens: number of tokens of its sequence shard; a symbol while torch.compile traces a graph.
            key_heads: as in `AttentionSpec`.
        """
