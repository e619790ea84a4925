"""Rebuilds a call when a compiled graph runs the op: from its key and its tensors, with the checks of `check_call`.

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
from armillary.attention.call.graph_key import CallNumbers, GraphKey
from armillary.attention.call.interface import AttentionMethod, StagedMethod
from armillary.attention.call.projections import Projections
from armillary.attention.call.registered import object_of
from armillary.attention.call.spec import AttentionSpec, key_heads_of
from armillary.attention.call.validation import check_call
from armillary.core import accumulation_dtype
from armillary.core.parts import compat


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


def rebuild_call(key: GraphKey, tensors: Sequence[Tensor], numbers: CallNumbers) -> AttentionCall | ProjectedCall:
    """Returns the call that a key describes.

    Args:
        tensors: the op's tensors: q, k and v; or x and the fields of `ProjectionParts` that are tensors.
    """
    if key.projected is None:
        q, k, v = tensors
        method: AttentionMethod = object_of(key.method)
        return AttentionCall(method, check_call(method, q, k, v, None, key.options(numbers)), key.return_lse)
    # The projector is looked up by its number, and uses its parameters as they are now.
    x, number, *projection_tensors = tensors
    projector: Projector = object_of(int(number.item()))
    staged_method, spec = _check_projected(key, x, numbers)
    dtype = key.autocast_dtype
    autocast = partial(torch.autocast, x.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    return ProjectedCall(
        staged_method, spec, projector.projections_of(projection_tensors[: int(key.projected.tensors)]), autocast
    )


def rebuild_backward_call(
    key: GraphKey, dout: Tensor, saved: Sequence[Tensor], key_shape: Sequence[int], numbers: CallNumbers
) -> AttentionCall | ProjectedCall:
    """Returns the call of forward again, for backward.

    Args:
        saved: the tensors that forward saved.
        key_shape: (S, K), tokens and heads of the call's keys. The saved k and v may be head shards instead.
    """
    if key.projected is not None:
        x, _, _, *projection_tensors = saved
        return rebuild_call(key, [x, *projection_tensors], numbers)
    # The call's own q, k and v may be freed. The checks read no values, so that one expanded element is enough.
    q, k, v, *_ = saved
    key_sizes = (dout.shape[0], *key_shape)
    like = ((dout.shape[:3], q), (key_sizes, k), (key_sizes, v))
    return rebuild_call(key, [x.new_empty(1).expand(*sizes, x.shape[3]) for sizes, x in like], numbers)


def empty_results(key: GraphKey, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """Returns empty tensors shaped like the results of `forward`, while a graph is traced.

    Tokens may be symbols, so the call, whose checks would specialize the graph to the present sizes, is not rebuilt.
    """
    method: Any = object_of(key.method)
    if key.projected is not None:
        q = _empty_queries(key, tensors[0])[0]
        key_heads = key_heads_of(int(key.projected.heads), int(key.projected.key_heads))
        return empty_projected_results(method, key_heads, key.shard_tokens[0], tensors[0], q, q, sinks)
    if method.redistributes_inputs:
        # `index` turns symbolic heads and dims into numbers, with guards.
        q, k, v = (x.new_empty((*x.shape[:2], *map(index, x.shape[2:]))) for x in tensors)
        method.check(q, k, v)
        key_heads, with_lse = key_heads_of(q.shape[2], k.shape[2]), key.return_lse or sinks is not None
        return empty_redistributed_results(method, q, k, v, key_heads, key.shard_tokens, with_lse)
    q, _, v = tensors
    return [q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))]


def projected_gradients(key: GraphKey, call: ProjectedCall, dout: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
    """Returns [dx, gradients of the parameters], none of which shares memory with another tensor.

    Args:
        saved: x, out, lse, then the tensors of `ProjectionParts`.
    """
    x, out, lse, _, *projection_tensors = saved
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with compat.above_autograd():
        grads = call.backward(dout, x, dx, out, lse)
    return [dx, *map(_local_gradient, grads, projection_tensors[tensor_count(key) :])]


def tensor_count(key: GraphKey) -> int:
    """Returns the number of `ProjectionParts.tensors` of the call."""
    assert key.projected is not None
    return int(key.projected.tensors)


def _check_projected(key: GraphKey, x: Tensor, numbers: CallNumbers) -> tuple[StagedMethod, AttentionSpec]:
    """Returns method and spec of a call on hidden states x."""
    method: Any = object_of(key.method)
    q, k = _empty_queries(key, x)
    return cast(StagedMethod, method), check_call(method, q, k, k, None, key.options(numbers))


def _empty_queries(key: GraphKey, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns empty tensors shaped like q and k of a call on hidden states x; both are one expanded element."""
    assert key.projected is not None
    heads, key_heads, dim, _ = key.projected
    element = x.new_empty(1, dtype=key.autocast_dtype or x.dtype)
    q, k = (element.expand(*x.shape[:2], n, dim) for n in (heads, key_heads))
    return q, k


def _local_gradient(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """Returns the gradient of the local part of a parameter, zeros if it has none."""
    if grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return compat.local_part(grad).to(parameter.dtype).clone(memory_format=torch.contiguous_format)
