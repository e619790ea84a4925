"""A call on hidden states in eager mode."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from armillary.attention.call.autograd import run_call, run_projected_call
from armillary.attention.call.calls import AttentionCall, ProjectedCall, head_sinks
from armillary.attention.call.interface import AttentionMethod, StagedMethod
from armillary.attention.call.projections import Projections
from armillary.attention.call.recompute import capture_autocast
from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import check_projected_call, check_transforms
from armillary.core.parts import compat


@compat.outside_old_graphs
def project_eagerly(
    method: AttentionMethod, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Returns out [B, T, H, Dv] of attention from hidden states x [B, T, E]. It is differentiable."""
    spec, sinks = check_projected_call(method, x, projections, sinks, options), head_sinks(sinks)
    if method.projects_in_stages:
        staged_method = cast(StagedMethod, method)
        call = ProjectedCall(staged_method, spec, projections, capture_autocast(x.device.type))
        return run_projected_call(call, x, sinks)
    # All heads at once. Queries are in flight while keys and values are projected.
    q = projections.q(x, range(projections.heads))
    check_transforms(q)
    transfer = method.prefetch_queries(q.detach(), spec.key_heads, spec.layout)
    k, v = projections.kv(x, range(projections.key_heads))
    call = AttentionCall(method, spec, False, [] if transfer is None else [transfer])
    out, _ = run_call(call, q, k, v, sinks)
    # When selective checkpointing recomputes a block, it takes saved results and does not run the op, which would have
    # waited for the transfer.
    while call.prefetched:
        call.prefetched.pop()()
    return out
