"""A call on local tensors: checked and run, or traced into a graph while torch.compile compiles its caller."""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.attention.call.autograd import run_call, trace_call
from armillary.attention.call.calls import AttentionCall, head_sinks
from armillary.attention.call.graph_calls import GraphCall, Traceable, autocast_name
from armillary.attention.call.interface import AttentionMethod
from armillary.attention.call.project import project_eagerly
from armillary.attention.call.projections import Projections
from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import cast_for_autocast, check_call, check_sinks, check_transforms
from armillary.core.parts import compat


def attend(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Returns (out [B, T, H, Dv], lse [B, T, H]). lse is empty if the call does not need it (`needs_lse`)."""
    if not q.dtype == k.dtype == v.dtype:  # outside of autocast `check_call` refuses them
        q, k, v = cast_for_autocast(q, k, v)
    if torch.compiler.is_compiling():
        # The op checks shapes, layout and mask when the graph runs, because a graph must not depend on Python objects.
        check_sinks(sinks, q.shape[-2], q.device)
        return trace_call(GraphCall.of(method, options, q.shape[1], k.shape[1]), [q, k, v], head_sinks(sinks))
    return _attend_eagerly(method, q, k, v, sinks, options)


@compat.outside_old_graphs
def _attend_eagerly(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    check_transforms(q, k, v, sinks)  # before a layout is made: dynamo cannot trace that under torch.func
    call = AttentionCall(method, check_call(method, q, k, v, sinks, options), options.return_lse)
    return run_call(call, q, k, v, head_sinks(sinks))


def attend_projected(
    method: AttentionMethod, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Returns out [B, T, H, Dv] of attention from hidden states x [B, T, E]."""
    if not torch.compiler.is_compiling():
        return project_eagerly(method, x, projections, sinks, options)
    # In a graph: projections of all heads are ordinary nodes of the graph, followed by attention. A staged method must
    # project stage by stage, and again in backward, so its op runs the projections.
    if not method.projects_in_stages:
        q, (k, v) = projections.q(x, range(projections.heads)), projections.kv(x, range(projections.key_heads))
        return attend(method, q, k, v, sinks, options)[0]
    projection_parts = projections.parts() if isinstance(projections, Traceable) else None
    if projection_parts is not None:
        check_sinks(sinks, projections.heads, x.device)
        heads = projections.heads, projections.key_heads, projection_parts.head_dim
        projected = autocast_name(x), *heads, len(projection_parts.tensors)
        graph_call = GraphCall.of(method, options, x.shape[1], x.shape[1], *projected)
        tensors = [x, projection_parts.projector, *projection_parts.tensors, *projection_parts.parameters]
        return trace_call(graph_call, tensors, head_sinks(sinks))[0]
    # Projections that an op cannot rebuild: a graph break.
    from armillary.attention.call.eager_only import project_outside_graphs

    return project_outside_graphs(method, x, projections, sinks, options)
