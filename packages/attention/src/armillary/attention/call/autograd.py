"""The ops that run forward and backward of a call, and the `autograd.Function`s around them.

Because attention is an op, selective checkpointing can save its results instead of running it twice, and a compiled
graph has no break. In eager mode the op takes the checked call, which is registered (`armillary.core.ops`). In a graph
it takes the objects of a `GraphCall`, and makes the call from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.call.calls import AttentionCall, ProjectedCall, sinks_gradient
from armillary.attention.call.graph_calls import GraphCall, empty_results, rebuild_call, run_backward_call
from armillary.attention.call.validation import check_transforms
from armillary.core.parts import OpArguments, compat, define_op, pack, pack_registered, unpack

# -- entry points -----------------------------------------------------------------------------------------------------


def run_call(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs a call in eager mode. Returns (out [B, T, H, Dv], lse [B, T, H] or empty). out is differentiable."""
    arguments = pack_registered(call.registered_id)
    if compat.transforms_on():  # the op without the Function, which torch.func would transform
        check_transforms(q, k, v, sinks)
        out, lse, *_ = _forward([q, k, v], sinks, *arguments)
    else:
        out, lse, *_ = cast(Any, Attention).apply(arguments, call, sinks, q, k, v)
    return out, lse


def run_projected_call(call: ProjectedCall, x: Tensor, sinks: Tensor | None) -> Tensor:
    """Runs a call on hidden states in eager mode. Returns out [B, T, H, Dv], which is differentiable."""
    return cast(Tensor, cast(Any, ProjectedAttention).apply(call, x, sinks, *call.trained_parameters()))


def trace_call(graph_call: GraphCall, tensors: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Traces a call into a graph. Returns (out, lse) as `run_call` does.

    Args:
        tensors: as in `rebuild_call`.
    """
    out, lse, *_ = _forward(tensors, sinks, *pack(*graph_call))
    return out, lse


# -- the op pair ------------------------------------------------------------------------------------------------------


def _run_forward(tensors: list[Tensor], sinks: Tensor | None, call: Any, *objects: Any) -> list[Tensor]:
    """Returns the results of the call's `forward`.

    Args:
        call, objects: the fields of `GraphCall` in a graph; in eager mode only the call.
    """
    return (rebuild_call(GraphCall(call, *objects), tensors) if objects else call).forward(tensors, sinks)


def _fake_forward(tensors: list[Tensor], sinks: Tensor | None, call: Any, *objects: Any) -> list[Tensor]:
    """The fake kernel of the forward op: returns empty tensors shaped like the results of `_run_forward`."""
    if objects:
        return empty_results(GraphCall(call, *objects), tensors, sinks)
    return call.empty_results(tensors, sinks)


def _run_backward(dout: Tensor, saved: list[Tensor], key_shape: list[int], call: Any, *objects: Any) -> list[Tensor]:
    """Returns the gradients of q, k and v; or of x and the parameters.

    Args:
        saved: the tensors that `Attention.forward` saved for backward, without those for the gradient of sinks.
        key_shape: (S, K), tokens and heads of the call's keys; empty for a call on hidden states.
    """
    if objects:
        return run_backward_call(GraphCall(call, *objects), dout, saved, key_shape)
    return call.backward(dout, saved)


def _fake_backward(dout: Tensor, saved: list[Tensor], key_shape: list[int], call: Any, *objects: Any) -> list[Tensor]:
    """The fake kernel of the backward op: returns empty tensors shaped like the results of `_run_backward`."""
    if not key_shape:  # a call on hidden states
        x, _, _, _, *projection_tensors = saved
        parameters = projection_tensors[GraphCall(call, *objects).tensor_count :]
        return [x.new_empty(x.shape), *(y.new_empty(y.shape) for y in parameters)]
    q, k, v, *_ = saved
    batch, tokens, heads, _ = dout.shape
    return [
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, *key_shape, k.shape[3])),
        v.new_empty((batch, *key_shape, v.shape[3])),
    ]


def _forward_with_autograd(tensors: list[Tensor], sinks: Tensor | None, *fields: Any) -> list[Tensor]:
    """The autograd kernel of the forward op.

    It runs if the op is called with autograd on, as while a graph is traced.
    """
    if not any(x is not None and x.requires_grad for x in (*tensors, sinks)):
        with compat.below_autograd():  # without the Function, which torch.func's transforms do not support
            return _forward(tensors, sinks, *fields)
    arguments = OpArguments(*fields)
    call, *objects = unpack(arguments, shapes_only=True)
    return list(cast(Any, Attention).apply(arguments, GraphCall(call, *objects) if objects else call, sinks, *tensors))


_forward = define_op(
    "attention", "Tensor[] tensors, Tensor? sinks", _run_forward, _fake_forward, _forward_with_autograd
)
_backward = define_op(
    "attention_backward", "Tensor dout, Tensor[] saved, SymInt[] key_shape", _run_backward, _fake_backward
)

# -- autograd ---------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Autograd around the op pair.

    Its tensors are q, k and v; or, for a call on hidden states in a graph, x and the tensors of `ProjectionParts`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        arguments: OpArguments,
        call: AttentionCall | GraphCall,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Below autograd, because otherwise the op would dispatch to its autograd kernel, which calls this function.
        with compat.below_autograd():
            results = _forward(tensors, sinks, *arguments)
        out, lse, *inner_tensors = results
        ctx.fields, ctx.call = arguments[1:], call  # `call` keeps the call alive, so that its number stays valid
        # In eager mode calls on hidden states have a Function of their own (`ProjectedAttention`). In a graph they come
        # here.
        ctx.count, ctx.projected = len(tensors), isinstance(call, GraphCall) and call.heads is not None
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
        ctx.save_for_backward(*arguments.tensors, *saved, *(for_dsinks if sinks is not None else ()))
        ctx.object_count, ctx.saved_count = len(arguments.tensors), len(saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, *other_grads = grad_outputs
        if not ctx.projected:
            refuse_gradients(other_grads, is_traced=isinstance(ctx.call, GraphCall))
        if dout is None:  # out is not part of the loss
            return (None,) * (3 + ctx.count)
        tensors = ctx.saved_tensors
        object_tensors, tensors = tensors[: ctx.object_count], tensors[ctx.object_count :]
        saved, for_dsinks = tensors[: ctx.saved_count], tensors[ctx.saved_count :]
        grads = _backward(dout, saved, ctx.key_shape, object_tensors, *ctx.fields)
        dsinks = sinks_gradient(dout, *for_dsinks) if for_dsinks else None
        # The tensors of a call on hidden states are x, others without a gradient, and the parameters. The op returns
        # the gradients of x and of the parameters; None goes between them. On q, k and v there is nothing between.
        return None, None, dsinks, grads[0], *[None] * (ctx.count - len(grads)), *grads[1:]


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
            out, lse, local_lse = _forward([x], sinks, *pack_registered(call.registered_id))
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
