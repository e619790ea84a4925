"""The ops that run forward and backward of a call, and the `autograd.Function`s around them.

Because attention is an op, selective checkpointing can save its results instead of running it twice, and a compiled
graph has no break. An op takes only tensors, numbers and strings, so the call comes as a key. In eager mode the key is
the number of a registered call (`registered.py`). In a graph the key describes the call (`graph_key.py`), and the op
rebuilds the call from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.call.calls import AttentionCall, ProjectedCall, sinks_gradient
from armillary.attention.call.graph_calls import (
    empty_results,
    projected_gradients,
    rebuild_backward_call,
    rebuild_call,
    tensor_count,
)
from armillary.attention.call.graph_key import NUMBERS_SCHEMA, OP_KEY_SCHEMA, CallNumbers, GraphKey, OpKey
from armillary.attention.call.registered import object_of
from armillary.attention.call.validation import check_transforms
from armillary.core.parts import compat

# -- entry points -----------------------------------------------------------------------------------------------------


def run_call(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs a call in eager mode. Returns (out [B, T, H, Dv], lse [B, T, H] or empty). out is differentiable."""
    key = OpKey(call.registered_id)
    if compat.transforms_on():  # the op without the Function, which torch.func would transform
        check_transforms(q, k, v, sinks)
        out, lse, *_ = _forward([q, k, v], sinks, *CallNumbers(), *key)
    else:
        out, lse, *_ = cast(Any, Attention).apply(key, call, CallNumbers(), sinks, q, k, v)
    return out, lse


def run_projected_call(call: ProjectedCall, x: Tensor, sinks: Tensor | None) -> Tensor:
    """Runs a call on hidden states in eager mode. Returns out [B, T, H, Dv], which is differentiable."""
    return cast(Tensor, cast(Any, ProjectedAttention).apply(call, x, sinks, *call.trained_parameters()))


def trace_call(
    key: GraphKey, tensors: list[Tensor], sinks: Tensor | None, numbers: CallNumbers
) -> tuple[Tensor, Tensor]:
    """Traces a call into a graph. Returns (out, lse) as `run_call` does.

    Args:
        tensors: as in `rebuild_call`.
    """
    out, lse, *_ = _forward(tensors, sinks, *numbers, *key.pack())
    return out, lse


# -- the op pair ------------------------------------------------------------------------------------------------------


def _run_forward(tensors: list[Tensor], sinks: Tensor | None, *values: Any) -> list[Tensor]:
    """Returns the results of the call's `forward`. `values` are the fields of `CallNumbers` and `OpKey`."""
    numbers, key = _split(values)
    call = rebuild_call(GraphKey.unpack(key), tensors, numbers) if key.in_graph else object_of(key.call)
    return call.forward(tensors, sinks)


def _fake_forward(tensors: list[Tensor], sinks: Tensor | None, *values: Any) -> list[Tensor]:
    """The fake kernel of the forward op: returns empty tensors shaped like the results of `_run_forward`."""
    _, key = _split(values)
    if key.in_graph:
        return empty_results(GraphKey.unpack(key, shapes_only=True), tensors, sinks)
    return object_of(key.call).empty_results(tensors, sinks)


def _run_backward(dout: Tensor, saved: list[Tensor], key_shape: list[int], *values: Any) -> list[Tensor]:
    """Returns the gradients of q, k and v; or of x and the parameters.

    Args:
        saved: the tensors that `Attention.forward` saved for backward, without those for the gradient of sinks.
        key_shape: (S, K), tokens and heads of the call's keys; empty for a call on hidden states.
    """
    numbers, key = _split(values)
    if not key.in_graph:
        return object_of(key.call).backward(dout, saved)
    graph_key = GraphKey.unpack(key)
    call = rebuild_backward_call(graph_key, dout, saved, key_shape, numbers)
    if isinstance(call, ProjectedCall):
        return projected_gradients(graph_key, call, dout, saved)
    return call.backward(dout, saved)


def _fake_backward(dout: Tensor, saved: list[Tensor], key_shape: list[int], *values: Any) -> list[Tensor]:
    """The fake kernel of the backward op: returns empty tensors shaped like the results of `_run_backward`."""
    if not key_shape:  # a call on hidden states
        x, _, _, _, *projection_tensors = saved
        parameters = projection_tensors[tensor_count(GraphKey.unpack(_split(values)[1], shapes_only=True)) :]
        return [x.new_empty(x.shape), *(y.new_empty(y.shape) for y in parameters)]
    q, k, v, *_ = saved
    batch, tokens, heads, _ = dout.shape
    return [
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, *key_shape, k.shape[3])),
        v.new_empty((batch, *key_shape, v.shape[3])),
    ]


def _forward_with_autograd(tensors: list[Tensor], sinks: Tensor | None, *values: Any) -> list[Tensor]:
    """The autograd kernel of the forward op.

    It runs if the op is called with autograd on, as while a graph is traced.
    """
    if not any(x is not None and x.requires_grad for x in (*tensors, sinks)):
        with compat.below_autograd():  # without the Function, which torch.func's transforms do not support
            return _forward(tensors, sinks, *values)
    numbers, key = _split(values)
    call = None if key.in_graph else object_of(key.call)
    return list(cast(Any, Attention).apply(key, call, numbers, sinks, *tensors))


def _split(values: Sequence[Any]) -> tuple[CallNumbers, OpKey]:
    """Returns the last arguments of an op as `CallNumbers` and `OpKey`."""
    count = len(CallNumbers._fields)
    return CallNumbers(*values[:count]), OpKey(*values[count:])


_forward = compat.define_op(
    f"attention(Tensor[] tensors, Tensor? sinks, {NUMBERS_SCHEMA}, {OP_KEY_SCHEMA}) -> Tensor[]",
    _run_forward,
    _fake_forward,
    _forward_with_autograd,
)
_backward = compat.define_op(
    "attention_backward(Tensor dout, Tensor[] saved, SymInt[] key_shape, "
    f"{NUMBERS_SCHEMA}, {OP_KEY_SCHEMA}) -> Tensor[]",
    _run_backward,
    _fake_backward,
)

# -- autograd ---------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Autograd around the op pair.

    Its tensors are q, k and v; or, for a call on hidden states in a graph, x and the tensors of `ProjectionParts`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        key: OpKey,
        call: AttentionCall | None,
        numbers: CallNumbers,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Below autograd, because otherwise the op would dispatch to its autograd kernel, which calls this function.
        with compat.below_autograd():
            results = _forward(tensors, sinks, *numbers, *key)
        out, lse, *inner_tensors = results
        ctx.key, ctx.call = key, call  # `call` keeps the call alive, so that its number stays valid
        # In eager mode calls on hidden states have a Function of their own (`ProjectedAttention`). In a graph they come
        # here, and their keys have more than seven numbers (`GraphKey.pack`).
        ctx.count, ctx.projected = len(tensors), key.in_graph and len(key.numbers) > 7
        ctx.set_materialize_grads(False)  # so that an unused lse has the gradient None instead of zeros
        if ctx.projected:
            # Backward projects q, k and v again, so only x, out, lse and the tensors of the projections are saved.
            (local_lse,) = inner_tensors
            ctx.key_shape, saved, for_dsinks = [], (tensors[0], out, lse, *tensors[1:]), (out, local_lse, sinks)
        else:
            # A method that redistributes its inputs (Ulysses) also returns the tensors for its backward: head shards.
            saved = inner_tensors or (*tensors, out, lse)
            ctx.key_shape, for_dsinks = tensors[1].shape[1:3], (out, lse, sinks)
        # The gradient of sinks needs out and lse of the local tokens. `saved` may have those of head shards instead.
        ctx.save_for_backward(*numbers, *saved, *(for_dsinks if sinks is not None else ()))
        ctx.saved_count = len(saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, *other_grads = grad_outputs
        if not ctx.projected:
            refuse_gradients(other_grads, is_traced=ctx.call is None)
        if dout is None:  # out is not part of the loss
            return (None,) * (4 + ctx.count)
        mask_numbers, layout, key_layout, *tensors = ctx.saved_tensors
        saved, for_dsinks = tensors[: ctx.saved_count], tensors[ctx.saved_count :]
        grads = _backward(dout, saved, ctx.key_shape, mask_numbers, layout, key_layout, *ctx.key)
        dsinks = sinks_gradient(dout, *for_dsinks) if for_dsinks else None
        # The tensors of a call on hidden states are x, others without a gradient, and the parameters. The op returns
        # the gradients of x and of the parameters; None goes between them. On q, k and v there is nothing between.
        return None, None, None, dsinks, grads[0], *[None] * (ctx.count - len(grads)), *grads[1:]


def refuse_gradients(grads: Sequence[Tensor | None], is_traced: bool) -> None:
    """Raises ValueError if lse has a gradient. For a traced call, the graph raises RuntimeError when it runs.

    Args:
        grads: gradients of all results except out.
    """
    message = "lse has no gradient here; detach it before it enters a loss"
    for grad in grads:
        if grad is not None and not is_traced:
            raise ValueError(message)
        # A graph passes zeros for an unused lse, so the values are checked when the graph runs.
        if grad is not None:
            compat.assert_later((grad == 0).all(), message)


class ProjectedAttention(torch.autograd.Function):
    """A call on hidden states x [B, T, E] in eager mode.

    Only forward is an op, whose results selective checkpointing can save. Backward is no op, because it runs the
    projections under autograd, and their parameters may be DTensors or adapters. Forward saves the parameters as they
    are, not a cast or unsharded copy, which would keep memory that FSDP frees.
    """

    @staticmethod
    def forward(ctx: Any, call: ProjectedCall, x: Tensor, sinks: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.call = call
        with compat.below_autograd():
            out, lse, local_lse = _forward([x], sinks, *CallNumbers(), *OpKey(call.registered_id))
        ctx.save_for_backward(x, sinks, out, lse, local_lse, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dout,) = grad_outputs
        x, sinks, out, lse, local_lse, *_ = ctx.saved_tensors
        dx = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        grads = ctx.call.backward(dout, x, dx, out, lse)
        dsinks = sinks_gradient(dout, out, local_lse, sinks) if ctx.needs_input_grad[2] else None
        return None, dx, dsinks, *grads
