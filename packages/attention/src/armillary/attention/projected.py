"""Projected attention as autograd sees it: from hidden states to out, keeping x, out and lse, and nothing else.

Its forward is a `torch.library` op inside an `autograd.Function`. The op, so that selective checkpointing can keep its
results; the Function, because backward runs the projections under autograd, whatever kind of parameters they have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.bridge import Plan, sinks_gradient, sunk
from armillary.attention.methods.sources import Projected
from armillary.attention.projections import Projections, one_token
from armillary.attention.spec import Call
from armillary.core.accumulate import Totals, accumulation_dtype
from armillary.core.observe.ledger import phase
from armillary.core.recompute import RNGReplay, capture_autocast, outside_autocast

if TYPE_CHECKING:
    from armillary.attention.methods.upipe import UPipe


@dataclass(frozen=True, eq=False, kw_only=True)
class ProjectedPlan(Plan):
    """A plan with projections, whose method is UPipe.

    Args:
        autocast: as it is where the call is made. An op cannot ask: where a dispatch mode runs it (a selective
            checkpoint's, or a counter's), torch has turned autocast off.
    """

    projections: Projections
    autocast: Callable[[], AbstractContextManager[Any]]
    draws: RNGReplay = field(default_factory=RNGReplay)

    @property
    def upipe(self) -> UPipe:
        return cast("UPipe", self.method)

    def trained(self) -> list[Tensor]:
        """The parameters that want a gradient, as they are now."""
        named = {id(parameter): parameter for parameter in self.projections.parameters() if parameter.requires_grad}
        return list(named.values())  # each once, even if two projections share it


def attend_projected(method: UPipe, call: Call, x: Tensor, projections: Projections, sinks: Tensor | None) -> Tensor:
    """out [B, T, H, Dv], differentiable in x, sinks and the projections' parameters."""
    autocast = capture_autocast(x.device.type)
    plan = ProjectedPlan(method, call, with_lse=False, projections=projections, autocast=autocast)
    return cast(Tensor, cast(Any, ProjectedAttention).apply(plan, x, sinks, *plan.trained()))


class ProjectedAttention(torch.autograd.Function):
    """The plan on x [B, T, E]. Parameters are saved as they are: never a copy, cast or unsharded, which FSDP frees."""

    @staticmethod
    def forward(ctx: Any, plan: ProjectedPlan, x: Tensor, sinks: Tensor | None, *trained: Tensor) -> Tensor:
        ctx.plan = plan
        with plan.numbered() as number:
            out, lse, local_lse = _forward(x, sinks, number)
        ctx.save_for_backward(x, sinks, out, lse, local_lse, *trained)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan: ProjectedPlan = ctx.plan
        (dout,) = grad_outputs
        x, sinks, out, lse, local_lse, *_ = ctx.saved_tensors
        dx = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        with plan.autocast():
            shares = backward(plan, dout, x, dx, out, lse)
        dsinks = sinks_gradient(dout, out, local_lse, sinks) if ctx.needs_input_grad[2] else None
        return None, dx, dsinks, *shares


def backward(
    plan: ProjectedPlan, dout: Tensor, x: Tensor, dx: Tensor | None, out: Tensor, lse: Tensor
) -> list[Tensor | None]:
    """Adds the gradient of x to dx; returns those of `plan.trained()`."""
    draws, totals = plan.draws.again(), Totals(plan.trained())
    source = Projected(x, plan.projections, dx=dx, totals=totals, draws=draws)
    with phase("backward"):
        plan.upipe.differentiate(dout, source, out, lse, plan.call)
    return totals.result()


@torch.library.custom_op("armillary::projected_attention", mutates_args=())
def _forward(x: Tensor, sinks: Tensor | None, plan: int) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse of this rank's heads, lse of its own tokens; the last is empty without sinks)."""
    found = cast(ProjectedPlan, Plan.at_hand[plan])
    with found.autocast():
        return forward(found, x, sinks)


def forward(plan: ProjectedPlan, x: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the op gives."""
    method, call = plan.upipe, plan.call
    out, lse = method.attend(Projected(x, plan.projections, draws=plan.draws), call)
    local_lse = lse.new_empty(0)
    if sinks is not None:
        with outside_autocast(x.device.type):
            out, local_lse = sunk(out, method.lse_to_seq(lse, call), sinks)
            lse = torch.logaddexp(lse, sinks[method.own_queries(call)].to(lse.dtype))
    return out, lse, local_lse


@_forward.register_fake
def _(x: Tensor, sinks: Tensor | None, plan: int) -> tuple[Tensor, Tensor, Tensor]:
    found = cast(ProjectedPlan, Plan.at_hand[plan])
    with found.autocast():
        q, _, v = one_token(x, found.projections)
    return forward_like(found.upipe, found.call, x, q, v, sinks)


def forward_like(
    upipe: UPipe, call: Call, x: Tensor, q: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors shaped as those of `forward`, for q [..., D] and v [..., Dv]."""
    out, lse = upipe.results(x.shape[0], q, v, call)
    local = (*out.shape[:3],) if sinks is not None else (0,)
    return out, lse, x.new_empty(local, dtype=accumulation_dtype(q.dtype))
