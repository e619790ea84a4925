"""A call on local tensors: checked, then run under autograd, or traced into a graph while torch.compile compiles.

    attend, project             the routes of a call, on q, k and v or on hidden states
    attention, its backward     the op pair, so that selective checkpointing can save results instead of running
                                attention twice, and a compiled graph has no break
    Attention                   the `autograd.Function` around the op pair

In eager mode the ops take a checked call, which is registered (`armillary.core.graph_ops`). In a graph they take the
objects of a `GraphCall`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.call.calls import (
    AttentionCall,
    GraphCall,
    ProjectedCall,
    autocast_name,
    head_sinks,
    latents_of,
    sinks_gradient,
)
from armillary.attention.call.qkv_sources import Projections, Traceable, latents_of_projections
from armillary.attention.call.recompute import capture_autocast
from armillary.attention.call.spec import AttentionMethod, AttentionOptions, StagedMethod
from armillary.attention.call.validation import (
    cast_for_autocast,
    check_call,
    check_projected_call,
    check_sinks,
    check_transforms,
)
from armillary.core.internal import OpArguments, compat, define_op, pack, pack_registered, register, unpack

# -- routes -----------------------------------------------------------------------------------------------------------


def attend(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out [B, T, H, Dv], lse [B, T, H]). lse is empty if the call does not need it.

    Args:
        weight: of the expansion, if k and v are rotary keys and latents.
    """
    tensors = (q, k, v) if weight is None else (q, k, v, weight)
    if not q.dtype == k.dtype == v.dtype or (weight is not None and weight.dtype != q.dtype):
        tensors = cast_for_autocast(*tensors)  # outside of autocast `check_call` refuses them
    if torch.compiler.is_compiling():
        # The op checks shapes, layout and mask when the graph runs, because a graph must not depend on Python objects.
        check_sinks(sinks, q.shape[-2], q.device)
        return trace(GraphCall.of(method, options, q.shape[1], k.shape[1]), list(tensors), sinks)
    if compat.transforms_on():
        check_transforms(*tensors, sinks)  # before a layout is made: dynamo cannot trace that under torch.func
    q, k, v, *weights = tensors
    spec = check_call(method, q, k, v, sinks, options, *weights)
    return run(AttentionCall(method, spec, options.return_lse), sinks, *tensors)


def project(
    method: AttentionMethod, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Returns out [B, T, H, Dv] of attention from hidden states x [B, T, E]."""
    # Latents are small, so queries are not sent ahead of them. A staged method takes both from its source.
    latents = None if method.projects_in_stages else latents_of_projections(projections)
    if latents is not None:
        q, (k, v) = projections.q(x, range(projections.heads)), latents.kv(x, range(1))
        return attend(method, q, k, v, sinks, options, latents.expansion())[0]
    if not torch.compiler.is_compiling():
        return project_eagerly(method, x, projections, sinks, options)
    # In a graph: projections of all heads are ordinary nodes of the graph, followed by attention. A staged method must
    # project stage by stage, and again in backward, so its op runs the projections.
    if not method.projects_in_stages:
        q, (k, v) = projections.q(x, range(projections.heads)), projections.kv(x, range(projections.key_heads))
        return attend(method, q, k, v, sinks, options)[0]
    projection_parts = projections.parts() if isinstance(projections, Traceable) else None
    if projection_parts is None:  # an op cannot rebuild the projections: a graph break
        from armillary.attention.call.eager_only import outside_graphs

        return outside_graphs(project_eagerly, method, x, projections, sinks, options)
    check_sinks(sinks, projections.heads, x.device)
    heads = projections.heads, projections.key_heads, projection_parts.head_dim, projection_parts.value_dim
    projected = autocast_name(x), *heads, len(projection_parts.tensors)
    call = GraphCall.of(method, options, x.shape[1], x.shape[1], *projected)
    tensors = [x, projection_parts.projector, *projection_parts.tensors, *projection_parts.parameters]
    return trace(call, tensors, sinks)[0]


def project_eagerly(
    method: AttentionMethod, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Returns out [B, T, H, Dv] of attention from hidden states x [B, T, E], in eager mode."""
    spec = check_projected_call(method, x, projections, sinks, options)
    if method.projects_in_stages:
        staged_method = cast(StagedMethod, method)
        staged_call = ProjectedCall(staged_method, spec, projections, capture_autocast(x.device.type))
        return run(staged_call, sinks, x, *staged_call.trained_parameters())[0]
    # All heads at once, under autograd. Queries are in flight while keys and values are projected.
    q = projections.q(x, range(projections.heads))
    check_transforms(q)  # before it is sent
    transfer = method.prefetch_queries(q.detach(), spec.key_heads, spec.layout)
    k, v = projections.kv(x, range(projections.key_heads))
    call = AttentionCall(method, spec, prefetched=[] if transfer is None else [transfer])
    out, _ = run(call, sinks, q, k, v)
    # When selective checkpointing recomputes a block, it takes saved results and does not run the op, which would have
    # waited for the transfer.
    while call.prefetched:
        call.prefetched.pop()()
    return out


def run(call: AttentionCall | ProjectedCall, sinks: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Runs a call in eager mode. Returns (out, lse); out is differentiable.

    Args:
        tensors: q, k and v; or x and the parameters of the projections.
    """
    fields = pack_registered(register(call))
    if sinks is not None:
        sinks = head_sinks(sinks)
    if compat.transforms_on():  # the op without the Function, which torch.func would transform
        check_transforms(*tensors, sinks)
        out, lse, *_ = _forward(tensors[: call.input_count], sinks, *fields)
    else:
        out, lse, *_ = cast(Any, Attention).apply(call, fields, sinks, *tensors)
    return out, lse


def trace(call: GraphCall, tensors: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Traces a call into a graph. Returns (out, lse) as `run` does.

    Args:
        tensors: as in `GraphCall.forward`.
    """
    out, lse, *_ = _forward(tensors, head_sinks(sinks), *pack(*call.objects))
    return out, lse


# -- the op pair ------------------------------------------------------------------------------------------------------


def _call_of(call: Any, *objects: Any) -> Any:
    """Returns the call that an op takes: a `GraphCall` of all its objects, or in eager mode the only object."""
    return GraphCall.of_objects(call, *objects) if objects else call


def _run_forward(tensors: list[Tensor], sinks: Tensor | None, *objects: Any) -> list[Tensor]:
    return _call_of(*objects).forward(tensors, sinks)


def _fake_forward(tensors: list[Tensor], sinks: Tensor | None, *objects: Any) -> list[Tensor]:
    return _call_of(*objects).empty_results(tensors, sinks)


def _run_backward(dout: Tensor, saved: list[Tensor], key_shape: list[int], *objects: Any) -> list[Tensor]:
    """Returns the gradients of q, k and v (and of the expansion's weight); or of x and the parameters.

    Args:
        saved: the tensors that `Attention.forward` saved for backward, without those for the gradient of sinks.
        key_shape: (S, K), tokens and heads of the call's keys; empty for a call on hidden states.
    """
    return _call_of(*objects).backward(dout, saved, key_shape)


def _fake_backward(dout: Tensor, saved: list[Tensor], key_shape: list[int], *objects: Any) -> list[Tensor]:
    if not key_shape:  # x, the number of the projector, its tensors, the parameters, out, lse
        x, parameters = saved[0], saved[2 + _call_of(*objects).tensor_count : -2]
        return [y.new_empty(y.shape) for y in (x, *parameters)]
    q, (k, v, *weight) = saved[0], latents_of(saved) or saved[1:3]
    batch, tokens, heads, _ = dout.shape
    return [
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, *key_shape, k.shape[3])),
        v.new_empty((batch, *key_shape, v.shape[3])),
        *[x.new_empty(x.shape) for x in weight],
    ]


def _forward_with_autograd(tensors: list[Tensor], sinks: Tensor | None, *fields: Any) -> list[Tensor]:
    """The autograd kernel of the forward op. Runs if the op is called with autograd on, as while a graph is traced."""
    if not any(x is not None and x.requires_grad for x in (*tensors, sinks)):
        with compat.below_autograd():  # without the Function, which torch.func's transforms do not support
            return _forward(tensors, sinks, *fields)
    arguments = OpArguments(*fields)
    call = _call_of(*unpack(arguments, shapes_only=True))
    return list(cast(Any, Attention).apply(call, arguments, sinks, *tensors))


_forward = define_op(
    "attention", "Tensor[] tensors, Tensor? sinks", _run_forward, _fake_forward, _forward_with_autograd
)
_backward = define_op(
    "attention_backward", "Tensor dout, Tensor[] saved, SymInt[] key_shape", _run_backward, _fake_backward
)

# -- autograd ---------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Autograd around the op pair.

    Its tensors are q, k and v; or q, rotary keys, latents and the weight of their expansion. Those of a call on hidden
    states are x and the parameters of the projections, and in a graph between them the other tensors of
    `ProjectionParts`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall | ProjectedCall | GraphCall,
        arguments: OpArguments,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Below autograd, because otherwise the op would dispatch to its autograd kernel, which calls this function.
        with compat.below_autograd():
            results = _forward(tensors[: call.input_count], sinks, *arguments)
        out, lse, *inner_tensors = results
        ctx.call, ctx.fields = call, arguments[1:]
        ctx.set_materialize_grads(False)  # so that an unused lse has the gradient None instead of zeros
        if call.is_projected:
            # Backward projects q, k and v again from x. It reads the parameters again: those saved here, as they are
            # and not as a cast or unsharded copy that would keep memory which FSDP frees, only tell in-place changes.
            ctx.key_shape, saved = [], (*tensors, out, *inner_tensors)
        else:
            # A method that redistributes its inputs (Ulysses) also returns the tensors for its backward: head shards.
            # Backward of latents also needs the call's own, and the weight of their expansion (`latents_of`).
            ctx.key_shape, q_k_v, weight = tensors[1].shape[1:3], tensors[:3], tensors[3:]
            own_latents = (*q_k_v[1:], *weight) if weight and inner_tensors else weight
            saved = (*(inner_tensors or (*q_k_v, out, lse)), *own_latents)
        # The gradient of sinks needs out and lse of the local tokens. `saved` may have those of head shards instead.
        for_dsinks = () if sinks is None else (out, lse, sinks)
        ctx.save_for_backward(*arguments.tensors, *saved, *for_dsinks)
        ctx.count, ctx.object_count, ctx.saved_count = len(tensors), len(arguments.tensors), len(saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, (dout, *other_grads) = ctx.call, grad_outputs
        if not call.is_projected:
            refuse_gradients(other_grads, is_traced=isinstance(call, GraphCall))
        if dout is None:  # out is not part of the loss
            return (None,) * (3 + ctx.count)
        tensors = ctx.saved_tensors  # read once: hooks may copy them from the host
        object_tensors, tensors = tensors[: ctx.object_count], tensors[ctx.object_count :]
        saved, for_dsinks = tensors[: ctx.saved_count], tensors[ctx.saved_count :]
        if isinstance(call, ProjectedCall):
            # No op, because it runs the projections under autograd, and their parameters may be DTensors or adapters.
            x, (out, lse) = saved[0], saved[-2:]
            dx = torch.zeros_like(x) if ctx.needs_input_grad[3] else None
            grads = [dx, *call.backward(dout, x, dx, out, lse)]
        else:
            # An eager call gets a new number: it is alive here, whatever became of its first number since forward.
            fields = ctx.fields if isinstance(call, GraphCall) else pack_registered(register(call))[1:]
            grads = _backward(dout, saved, ctx.key_shape, object_tensors, *fields)
        dsinks = sinks_gradient(dout, *for_dsinks) if for_dsinks else None
        # The gradient of x comes first, those of the parameters last. What lies between in a graph has none; on q, k
        # and v nothing does.
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
