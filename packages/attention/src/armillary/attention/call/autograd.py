"""The pair of ops that runs forward and backward of every call, inside an `autograd.Function`.

With an op, selective checkpointing can save the results instead of running attention twice, and a compiled graph has no
break; in a graph the Function is the op's autograd kernel. An op takes only tensors, numbers and strings. In eager mode
its key is the number of a registered call (`calls.py`). In a graph the key describes the call (`graph_key.py`), and the
op rebuilds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.call.calls import AttentionCall, ProjectedCall, sinks_gradient
from armillary.attention.call.graph_calls import (
    projected_gradients,
    rebuild_backward_call,
    rebuild_call,
    results_like,
    tensor_count,
)
from armillary.attention.call.graph_key import OP_KEY_SCHEMA, GraphKey, OpKey
from armillary.attention.call.registered import object_of
from armillary.attention.call.validation import check_transforms
from armillary.core import compat

# -- entries ----------------------------------------------------------------------------------------------------------


def run_call(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs a call outside of graphs. Returns (out [B, T, H, Dv], lse [B, T, H] or empty), differentiable."""
    key = OpKey(call.registered_id)
    if compat.transforms_on():  # torch.func would transform an autograd.Function
        check_transforms(q, k, v, sinks)
        out, lse, *_ = _forward([q, k, v], sinks, None, *key)
    else:
        out, lse, *_ = cast(Any, Attention).apply(key, call, None, sinks, q, k, v)
    return out, lse


def run_projected_call(call: ProjectedCall, x: Tensor, sinks: Tensor | None) -> Tensor:
    """Runs a call on hidden states outside of graphs. Returns out [B, T, H, Dv], differentiable."""
    return cast(Tensor, cast(Any, ProjectedAttention).apply(call, x, sinks, *call.trained_parameters()))


def trace_call(
    key: GraphKey, tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a call while a graph is traced. `tensors` as in `rebuild_call`. Returns (out, lse) like `run_call`."""
    out, lse, *_ = _forward(tensors, sinks, mask_numbers, *key.pack())
    return out, lse


# -- the op pair ------------------------------------------------------------------------------------------------------


def _run_forward(
    tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key_values: Any
) -> list[Tensor]:
    key = OpKey(*key_values)
    call = rebuild_call(GraphKey.unpack(key), tensors, mask_numbers) if key.in_graph else object_of(key.call)
    return call.forward(tensors, sinks)


def _forward_like(
    tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key_values: Any
) -> list[Tensor]:
    """Returns empty tensors shaped like the results of `_run_forward`, for fake tensors and graphs."""
    key = OpKey(*key_values)
    if key.in_graph:
        return results_like(GraphKey.unpack(key, shapes_only=True), tensors, sinks)
    return object_of(key.call).forward_like(tensors, sinks)


def _run_backward(
    dout: Tensor, saved: list[Tensor], key_shape: list[int], mask_numbers: Tensor | None, *key_values: Any
) -> list[Tensor]:
    """Returns the gradients of q, k, v; or of x and the parameters. `key_shape` are tokens and heads of the keys."""
    key = OpKey(*key_values)
    if not key.in_graph:
        return object_of(key.call).backward(dout, saved)
    graph_key = GraphKey.unpack(key)
    call = rebuild_backward_call(graph_key, dout, saved, key_shape, mask_numbers)
    if isinstance(call, ProjectedCall):
        return projected_gradients(graph_key, call, dout, saved)
    return call.backward(dout, saved)


def _backward_like(
    dout: Tensor, saved: list[Tensor], key_shape: list[int], mask_numbers: Tensor | None, *key_values: Any
) -> list[Tensor]:
    """Returns empty tensors shaped like the results of `_run_backward`."""
    if not key_shape:  # a call on hidden states
        x, _, _, _, *projection_tensors = saved
        parameters = projection_tensors[tensor_count(GraphKey.unpack(OpKey(*key_values), shapes_only=True)) :]
        return [x.new_empty(x.shape), *(y.new_empty(y.shape) for y in parameters)]
    q, k, v, *_ = saved
    batch, tokens, heads, _ = dout.shape
    return [
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, *key_shape, k.shape[3])),
        v.new_empty((batch, *key_shape, v.shape[3])),
    ]


def _forward_with_autograd(
    tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key_values: Any
) -> list[Tensor]:
    """The op's autograd kernel, which runs when the op is called with autograd on, such as while a graph is traced."""
    if not any(x is not None and x.requires_grad for x in (*tensors, sinks)):
        with compat.below_autograd():  # also under torch.func transforms, which do not support this Function
            return _forward(tensors, sinks, mask_numbers, *key_values)
    key = OpKey(*key_values)
    call = None if key.in_graph else object_of(key.call)
    return list(cast(Any, Attention).apply(key, call, mask_numbers, sinks, *tensors))


_forward = compat.define_op(
    f"attention(Tensor[] tensors, Tensor? sinks, Tensor? mask_numbers, {OP_KEY_SCHEMA}) -> Tensor[]",
    _run_forward,
    _forward_like,
    _forward_with_autograd,
)
_backward = compat.define_op(
    "attention_backward(Tensor dout, Tensor[] saved, SymInt[] key_shape, Tensor? mask_numbers, "
    f"{OP_KEY_SCHEMA}) -> Tensor[]",
    _run_backward,
    _backward_like,
)

# -- autograd ---------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """The op pair with autograd around it: on q, k, v, or in a graph also on x and the projections' tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        key: OpKey,
        call: AttentionCall | None,
        mask_numbers: Tensor | None,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Below autograd: above it, the op would dispatch to its autograd kernel, which is this function.
        with compat.below_autograd():
            results = _forward(tensors, sinks, mask_numbers, *key)
        out, lse, *inner_tensors = results
        ctx.key, ctx.call = key, call  # keeps the call alive: its number is only valid as long as it lives
        # Only graphs pass calls on hidden states here; theirs have numbers after the fifth (`GraphKey.unpack`).
        ctx.count, ctx.projected = len(tensors), key.in_graph and len(key.numbers) > 5
        ctx.set_materialize_grads(False)  # an unused lse then has no gradient instead of zeros
        if ctx.projected:
            # Backward recomputes q, k and v: it needs x, out and lse only.
            (local_lse,) = inner_tensors
            ctx.key_shape, saved, local = [], (tensors[0], out, lse, *tensors[1:]), (out, local_lse, sinks)
        else:
            # A method that redistributes its inputs (Ulysses) returns the tensors for its backward: head shards.
            saved = inner_tensors or (*tensors, out, lse)
            ctx.key_shape, local = tensors[1].shape[1:3], (out, lse, sinks)
        # dsinks needs out and lse of local tokens, which `saved` may not have; without sinks they are not saved twice.
        ctx.save_for_backward(mask_numbers, *saved, *(local if sinks is not None else ()))
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
        mask_numbers, *tensors = ctx.saved_tensors
        saved, local = tensors[: ctx.saved_count], tensors[ctx.saved_count :]
        grads = _backward(dout, saved, ctx.key_shape, mask_numbers, *ctx.key)
        dsinks = sinks_gradient(dout, *local) if local else None
        # The op returns gradients of x and of the parameters, which are the first and the last of the tensors of a
        # projected call; the tensors between them have no gradient.
        return None, None, None, dsinks, grads[0], *[None] * (ctx.count - len(grads)), *grads[1:]


def refuse_gradients(grads: Sequence[Tensor | None], is_traced: bool) -> None:
    """Raises ValueError for a gradient of lse."""
    message = "lse has no gradient here; detach it before it enters a loss"
    for grad in grads:
        if grad is not None and not is_traced:
            raise ValueError(message)
        # A graph passes zeros for an unused lse, so their values are checked when it runs.
        if grad is not None:
            compat.assert_later((grad == 0).all(), message)


class ProjectedAttention(torch.autograd.Function):
    """A call on x [B, T, E]. Saves the parameters themselves, never a cast or unsharded copy, which FSDP frees.

    A Function around the op, because backward runs the projections under autograd, with any kind of parameters.
    Selective checkpointing can still save the results of the op inside.
    """

    @staticmethod
    def forward(ctx: Any, call: ProjectedCall, x: Tensor, sinks: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.call = call
        with compat.below_autograd():
            out, lse, local_lse = _forward([x], sinks, None, *OpKey(call.registered_id))
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
