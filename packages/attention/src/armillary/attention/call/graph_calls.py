"""Rebuilds a call when a compiled graph runs the op: from its key and its tensors, with all checks of an eager call.

Projections are not traced. The op takes the registered number of the module that makes them, and makes them when it
runs: from tensors that are inputs of the graph, and from the module's current parameters, which FSDP may have swapped.
The parameters are inputs too, so that the op can return their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from armillary.attention.call.calls import AttentionCall, ProjectedCall, projected_results_like
from armillary.attention.call.graph_key import GraphKey
from armillary.attention.call.interface import AttentionMethod, StagedMethod
from armillary.attention.call.projections import Projections
from armillary.attention.call.registered import object_of
from armillary.attention.call.spec import AttentionSpec
from armillary.attention.call.validation import check_call
from armillary.core import accumulation_dtype, compat


class Projector(Protocol):
    """A module that makes projections. Registered (`register_as_tensor`) before anything is traced."""

    def projections_of(self, tensors: Sequence[Tensor]) -> Projections:
        """Returns the projections made of these `tensors` and the module's current parameters."""
        ...


class ProjectionParts(NamedTuple):
    """The parts of projections in types that an op takes.

    Args:
        projector: registered number of the `Projector`, as a tensor.
        head_dim: D, equal to Dv.
        tensors: besides parameters.
        parameters: local parts of the `Projections.parameters()` that require a gradient, each once, in order.
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


def rebuild_call(
    key: GraphKey, tensors: Sequence[Tensor], mask_numbers: Tensor | None
) -> AttentionCall | ProjectedCall:
    """Returns the call on the op's tensors: q, k, v; or x, projector, the projections' tensors and parameters."""
    if key.projected is None:
        q, k, v = tensors
        method: AttentionMethod = object_of(key.method)
        return AttentionCall(method, check_call(method, q, k, v, None, key.options(mask_numbers)), key.return_lse)
    # The projector is found by number, and reads its parameters as they are now.
    x, number, *projection_tensors = tensors
    projector: Projector = object_of(int(number.item()))
    staged_method, spec, _ = _check_projected(key, x, mask_numbers)
    dtype = key.autocast_dtype
    autocast = partial(torch.autocast, x.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    return ProjectedCall(
        staged_method, spec, projector.projections_of(projection_tensors[: int(key.projected.tensors)]), autocast
    )


def rebuild_backward_call(
    key: GraphKey, dout: Tensor, saved: Sequence[Tensor], key_shape: Sequence[int], mask_numbers: Tensor | None
) -> AttentionCall | ProjectedCall:
    """Returns the forward call. Its q, k and v may be freed: checks only read shapes.

    Args:
        key_shape: tokens and heads of the call's keys; the saved ones may have been redistributed.
    """
    if key.projected is not None:
        x, _, _, *projection_tensors = saved
        return rebuild_call(key, [x, *projection_tensors], mask_numbers)
    q, k, v, *_ = saved
    key_sizes = (dout.shape[0], *key_shape)
    like = ((dout.shape[:3], q), (key_sizes, k), (key_sizes, v))
    return rebuild_call(key, [x.new_empty(1).expand(*sizes, x.shape[3]) for sizes, x in like], mask_numbers)


def results_like(key: GraphKey, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """Returns empty tensors shaped like the forward's results.

    Checks specialize the graph to these very sizes, so they run only where shapes follow from the layout.
    """
    if key.projected is not None:
        staged_method, spec, q = _check_projected(key, tensors[0], None)
        return projected_results_like(staged_method, spec, tensors[0], q, q, sinks)
    method: AttentionMethod = object_of(key.method)
    if method.redistributes_inputs:  # tokens, heads and dims as numbers instead of symbols
        tensors = [x.new_empty((x.shape[0], *map(index, x.shape[1:]))) for x in tensors]
        return rebuild_call(key, tensors, None).forward_like(tensors, sinks)
    q, _, v = tensors
    return [q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))]


def projected_gradients(key: GraphKey, call: ProjectedCall, dout: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
    """Returns [dx, gradients of the parameters], none of which shares memory with another tensor.

    Args:
        saved: x, out, lse, projector, the projections' tensors, parameters.
    """
    x, out, lse, _, *projection_tensors = saved
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with compat.above_autograd():
        grads = call.backward(dout, x, dx, out, lse)
    return [dx, *map(_local_gradient, grads, projection_tensors[tensor_count(key) :])]


def tensor_count(key: GraphKey) -> int:
    """Returns the number of tensors, besides parameters, that the projections of the call are made of."""
    assert key.projected is not None
    return int(key.projected.tensors)


def _check_projected(
    key: GraphKey, x: Tensor, mask_numbers: Tensor | None
) -> tuple[StagedMethod, AttentionSpec, Tensor]:
    """Returns (method, checked call, an empty tensor shaped like q) for hidden states x."""
    assert key.projected is not None
    method: Any = object_of(key.method)
    heads, key_heads, dim, _ = key.projected
    # Checks read only shapes and dtypes: q and k are one expanded element, without memory.
    element = x.new_empty(1, dtype=key.autocast_dtype or x.dtype)
    q, k = (element.expand(*x.shape[:2], n, dim) for n in (heads, key_heads))
    return cast(StagedMethod, method), check_call(method, q, k, k, None, key.options(mask_numbers)), q


def _local_gradient(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """Returns the gradient of the local part of a parameter, zeros if it has none."""
    if grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return compat.local_part(grad).to(parameter.dtype).clone(memory_format=torch.contiguous_format)
