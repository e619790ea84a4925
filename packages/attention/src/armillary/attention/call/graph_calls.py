"""A call in a graph of torch.compile: the objects that its op takes, and the call that the op makes of them.

A graph must not depend on the values of a call, so the call is checked when the graph runs (`check_call`).

The projections of a staged method are not traced. The op takes the registered number of the module that makes them
(`Projector`), and calls it when the graph runs, with tensors that are inputs of the graph. The module uses its current
parameters, because FSDP may have swapped them. The parameters are inputs of the op too, so that it can return their
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from armillary.attention.call.calls import (
    AttentionCall,
    ProjectedCall,
    empty_projected_results,
    empty_redistributed_results,
)
from armillary.attention.call.interface import AttentionMethod, StagedMethod
from armillary.attention.call.projections import Projections
from armillary.attention.call.spec import AttentionOptions, key_heads_of
from armillary.attention.call.validation import check_call
from armillary.attention.kernels import KERNELS
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout, accumulation_dtype
from armillary.core.parts import compat, object_of

AUTOCAST_DTYPES = {
    "": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Dtypes of autocast by name; "" is autocast off."""


class Projector(Protocol):
    """A module that makes projections. It must be registered (`register_as_tensor`) before a graph is traced."""

    def projections_of(self, tensors: Sequence[Tensor]) -> Projections:
        """Returns projections that use `tensors` and the module's current parameters."""
        ...


class ProjectionParts(NamedTuple):
    """Everything from which projections are rebuilt, in types that an op takes.

    Args:
        projector: registered number of the `Projector`, as a tensor.
        head_dim: D, which Dv must equal.
        tensors: the argument of `Projector.projections_of`.
        parameters: those of `Projections.parameters()` that require a gradient, each once, in order; of a DTensor the
            local part.
    """

    projector: Tensor
    head_dim: int
    tensors: list[Tensor]
    parameters: list[Tensor]


@runtime_checkable
class Traceable(Protocol):
    """Projections that a compiled graph can rebuild from parts."""

    def parts(self) -> ProjectionParts | None:
        """Returns the parts from which a `Projector` rebuilds equal projections; None if it cannot."""
        ...


class GraphCall(NamedTuple):
    """A call without its tensors: the objects that the ops take in a graph.

    Args:
        mask, layout, key_layout: as in `AttentionOptions`; None in fake kernels, where their values are unknown.
        kernel: its name.
        tokens, key_tokens: `shard_tokens` of queries and keys if the shapes of results depend on them, otherwise 0.
        autocast: name of autocast's dtype for projections (`autocast_name`).
        heads, key_heads, head_dim: H, K and D of a call on hidden states; None for calls on q, k and v.
        tensor_count: number of `ProjectionParts.tensors`.
    """

    method: AttentionMethod
    mask: AttentionMask
    layout: SequenceLayout | None
    key_layout: SequenceLayout | None
    scale: float | None
    softcap: float | None
    kernel: str | None
    return_lse: bool
    tokens: int
    key_tokens: int
    autocast: str = ""
    heads: int | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    tensor_count: int = 0

    @classmethod
    def of(
        cls, method: AttentionMethod, options: AttentionOptions, tokens: int, key_tokens: int, *projected: Any
    ) -> GraphCall:
        """Returns the description of a call.

        Args:
            tokens, key_tokens: numbers of this rank's queries and keys.
            projected: the fields from `autocast` on.

        Raises:
            ValueError: the kernel is an object that is not in `KERNELS`, where the op looks up its name.
        """
        mask, layout, key_layout, scale, softcap, kernel, return_lse = options
        if not (isinstance(kernel, str | None) or any(kernel is known_kernel for known_kernel in KERNELS)):
            names = ", ".join(known_kernel.name for known_kernel in KERNELS)
            raise ValueError(f"torch.compile takes kernels of {names}; got {kernel}")
        if method.redistributes_inputs or method.projects_in_stages:
            tokens = shard_tokens(method, layout, tokens)
            key_tokens = shard_tokens(method, layout if key_layout is None else key_layout, key_tokens)
        else:
            tokens = key_tokens = 0  # a graph for all values
        return cls(
            method,
            mask,
            layout,
            key_layout,
            None if scale is None else float(scale),
            None if softcap is None else float(softcap),
            kernel if kernel is None or isinstance(kernel, str) else kernel.name,
            return_lse,
            tokens,
            key_tokens,
            *projected,
        )

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(*cast(Any, self[1 : 1 + len(AttentionOptions._fields)]))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Autocast's dtype for projections when the call was traced; None for `autocast` ""."""
        return AUTOCAST_DTYPES[self.autocast]

    def empty_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns empty tensors shaped like q and k of a call on hidden states x; both are one expanded element."""
        element: Any = x.new_empty(1, dtype=self.autocast_dtype or x.dtype)
        q, k = (element.expand(*x.shape[:2], n, self.head_dim) for n in (self.heads, self.key_heads))
        return q, k


def autocast_name(x: Tensor) -> str:
    """Returns the name of autocast's dtype for projections of x; "" if autocast is off or x is float64."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or x.dtype == torch.float64:
        return ""
    dtype = torch.get_autocast_dtype(device_type)
    return next(name for name, candidate in AUTOCAST_DTYPES.items() if candidate == dtype)


def shard_tokens(method: AttentionMethod, layout: SequenceLayout | None, tokens: int) -> int:
    """Returns the number of tokens of this rank's sequence shard, from which an op computes the shapes of its results.

    While a graph is traced it is a symbol, unlike the values of a layout.

    Args:
        layout: layout over all ranks of the method or over its sequence axis; None if there is one shard.
        tokens: number of tokens of this rank.
    """
    if layout is None:
        return tokens
    # Not a sum of `sizes`: torch.compile would make each of them a symbol at the first length that changes it.
    head_ranks = method.shards // method.sequence_shards
    shard, ranks = method.shard // head_ranks, head_ranks if len(layout.sizes) == method.shards else 1
    return layout.ends[(shard + 1) * ranks] - layout.ends[shard * ranks]


def rebuild_call(graph_call: GraphCall, tensors: Sequence[Tensor]) -> AttentionCall | ProjectedCall:
    """Returns the checked call.

    Args:
        tensors: the op's tensors: q, k and v; or x and the fields of `ProjectionParts` that are tensors.
    """
    method, options = graph_call.method, graph_call.options
    if graph_call.heads is None:
        q, k, v = tensors
        return AttentionCall(method, check_call(method, q, k, v, None, options), graph_call.return_lse)
    # The projector is looked up by its number, and uses its parameters as they are now.
    x, number, *projection_tensors = tensors
    projector: Projector = object_of(int(number.item()))
    q, k = graph_call.empty_queries(x)
    spec, dtype = check_call(method, q, k, k, None, options), graph_call.autocast_dtype
    autocast = partial(torch.autocast, x.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    projections = projector.projections_of(projection_tensors[: graph_call.tensor_count])
    return ProjectedCall(cast(StagedMethod, method), spec, projections, autocast)


def run_backward_call(
    graph_call: GraphCall, dout: Tensor, saved: Sequence[Tensor], key_shape: Sequence[int]
) -> list[Tensor]:
    """Rebuilds the call and returns the gradients of q, k and v; or of x and the parameters, alone in their memory.

    Args:
        saved: the tensors that forward saved: x, out, lse, then those of `ProjectionParts` for a call on hidden states.
        key_shape: (S, K), tokens and heads of the call's keys. The saved k and v may be head shards instead.
    """
    if graph_call.heads is None:
        # The call's own q, k and v may be freed. The checks read no values, so that one expanded element is enough.
        q, k, v, *_ = saved
        key_sizes = (dout.shape[0], *key_shape)
        like = ((dout.shape[:3], q), (key_sizes, k), (key_sizes, v))
        call = rebuild_call(graph_call, [x.new_empty(1).expand(*sizes, x.shape[3]) for sizes, x in like])
        return cast(AttentionCall, call).backward(dout, saved)
    x, out, lse, *projection_tensors = saved
    projected_call = cast(ProjectedCall, rebuild_call(graph_call, [x, *projection_tensors]))
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with compat.above_autograd():
        grads = projected_call.backward(dout, x, dx, out, lse)
    parameters = projection_tensors[1 + graph_call.tensor_count :]
    return [dx, *map(_local_gradient, grads, parameters)]


def empty_results(graph_call: GraphCall, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """Returns empty tensors shaped like the results of `forward`, while a graph is traced.

    Tokens may be symbols, so the call, whose checks would specialize the graph to the present sizes, is not rebuilt.
    """
    method: Any = graph_call.method
    if graph_call.heads is not None:
        q, k = graph_call.empty_queries(tensors[0])
        key_heads = key_heads_of(int(q.shape[2]), int(k.shape[2]))
        return empty_projected_results(method, key_heads, graph_call.tokens, tensors[0], q, q, sinks)
    if method.redistributes_inputs:
        # `index` turns symbolic heads and dims into numbers, with guards.
        q, k, v = (x.new_empty((*x.shape[:2], *map(index, x.shape[2:]))) for x in tensors)
        method.check(q, k, v)
        key_heads, with_lse = key_heads_of(q.shape[2], k.shape[2]), graph_call.return_lse or sinks is not None
        return empty_redistributed_results(
            method, q, k, v, key_heads, (graph_call.tokens, graph_call.key_tokens), with_lse
        )
    q, _, v = tensors
    return [q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))]


def _local_gradient(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """Returns the gradient of the local part of a parameter, zeros if it has none."""
    if grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return compat.local_part(grad).to(parameter.dtype).clone(memory_format=torch.contiguous_format)
