"""Projected attention in stages of heads inside `torch.compile`: an opaque op, whose gradient is another one.

Projections are not traced. The op is given the number of what makes them, which must be there before, and makes them
when it runs: of tensors that are inputs of the graph, and of parameters as they are then, which FSDP may have swapped.
The parameters are inputs too, so that their gradients have somewhere to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.attention import projected, traced
from armillary.attention.bridge import sinks_gradient
from armillary.attention.projected import ProjectedPlan
from armillary.attention.projections import Projections
from armillary.attention.traced import NUMBERED, OPTIONS, Options
from armillary.core import compat
from armillary.core.recompute import capture_autocast

if TYPE_CHECKING:
    from armillary.attention.methods.upipe import UPipe


MADE_OF = "Tensor? ends, Tensor ticket, Tensor[] tensors, Tensor[] parameters, SymInt[] dims, ScalarType? autocast"
"""`Made` in an op's schema."""


class Made(NamedTuple):
    """What an op makes projections of, for a mask with these documents.

    Args:
        ends: as `AttentionMask.ends`.
        ticket, tensors, parameters: as `Parts`.
        dims: H, K and D.
        autocast: the dtype that is in force, if one is.
    """

    ends: Tensor | None
    ticket: Tensor
    tensors: Sequence[Tensor]
    parameters: Sequence[Tensor]
    dims: Sequence[int]
    autocast: torch.dtype | None


class Projector(Protocol):
    """What makes projections. Numbered (`traced.number`) before anything is traced."""

    def projections_of(self, tensors: Sequence[Tensor]) -> Projections:
        """The projections whose `tensors` these are, with parameters as they are now."""
        ...


class Parts(NamedTuple):
    """What projections are made of, as an op takes it.

    Args:
        ticket: of their `Projector` (`traced.ticket`).
        head_dim: D, and Dv.
        tensors: besides parameters.
        parameters: what this rank has of those of `parameters()` that want a gradient, each once, in their order.
    """

    ticket: Tensor
    head_dim: int
    tensors: list[Tensor]
    parameters: list[Tensor]


@runtime_checkable
class Traceable(Protocol):
    """Projections that a compiled graph need not know."""

    def parts(self) -> Parts | None:
        """What makes them again, with the same numbers; None if that cannot be promised."""
        ...


def attend(
    x: Tensor, heads: Sequence[int], parts: Parts, sinks: Tensor | None, options: Options, ends: Tensor | None
) -> Tensor:
    """out [B, T, H, Dv]: what a traced `projected` becomes, with H and K `heads`."""
    kind = x.device.type
    lowered = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if lowered else None
    made = Made(ends, parts.ticket, parts.tensors, parts.parameters, [*heads, parts.head_dim], dtype)
    return _forward(x, sinks, *made, *options)[0]


@torch.library.custom_op(
    "armillary::traced_projected_attention",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? sinks, {MADE_OF}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _forward(x: Tensor, sinks: Tensor | None, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `armillary::projected_attention`. `call`: `Made`, and then `Options`."""
    made, options = split(call)
    with as_then(x, made.autocast):
        return projected.forward(plan(x, made, options), x, sinks)


def split(call: Sequence[Any]) -> tuple[Made, Options]:
    count = len(Made._fields)
    return Made(*call[:count]), Options(*call[count:])


def as_then(x: Tensor, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as it was when the op was called."""
    return torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None, cache_enabled=False)


def plan(x: Tensor, made: Made, options: Options) -> ProjectedPlan:
    """What `Method.projected` makes of the same call."""
    projector: Projector = NUMBERED[int(made.ticket.item())]
    one = x.new_empty(1, dtype=made.autocast or x.dtype)
    q, k = (one.expand(*x.shape[:2], heads, made.dims[2]) for heads in made.dims[:2])
    inner = traced.plan(q, k, k, None, made.ends, options)
    projections, autocast = projector.projections_of(made.tensors), capture_autocast(x.device.type)
    return ProjectedPlan(inner.method, inner.call, with_lse=False, projections=projections, autocast=autocast)


@_forward.register_fake
def _(x: Tensor, sinks: Tensor | None, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    made, options = split(call)
    dtype = made.autocast or x.dtype
    q, k = (x.new_empty((*x.shape[:2], heads, made.dims[2]), dtype=dtype) for heads in made.dims[:2])
    found = traced.shapes(q, k, k, None, options)
    return projected.forward_like(cast("UPipe", found.method), found.call, x, q, k, sinks)


@torch.library.custom_op(
    "armillary::traced_projected_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor x, Tensor out, Tensor lse, {MADE_OF}, {OPTIONS}) -> Tensor[]",
)
def _backward(dout: Tensor, x: Tensor, out: Tensor, lse: Tensor, *call: Any) -> list[Tensor]:
    """[dx, the gradients of `parameters`]"""
    made, options = split(call)
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with compat.above_autograd(), as_then(x, made.autocast):
        shares = projected.backward(plan(x, made, options), dout, x, dx, out, lse)
    return [dx, *(local(share, parameter) for share, parameter in zip(shares, made.parameters, strict=True))]


def local(share: Tensor | None, parameter: Tensor) -> Tensor:
    """The gradient of what this rank has of a parameter, in memory of its own."""
    if share is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    mine = share.to_local() if isinstance(share, DTensor) else share
    return mine.to(parameter.dtype).clone(memory_format=torch.contiguous_format)


@_backward.register_fake
def _(dout: Tensor, x: Tensor, out: Tensor, lse: Tensor, *call: Any) -> list[Tensor]:
    made, _ = split(call)
    return [x.new_empty(x.shape), *(parameter.new_empty(parameter.shape) for parameter in made.parameters)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, sinks, ends, ticket, tensors, parameters, *call = inputs
    ctx.call, ctx.counts = call, (len(tensors), len(parameters))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, sinks, ends, ticket, *output, *tensors, *parameters)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    x, sinks, ends, ticket, out, lse, local_lse, *others = ctx.saved_tensors
    tensors, parameters = others[: ctx.counts[0]], others[ctx.counts[0] :]
    nothing, dout = [None] * len(ctx.call), grads[0]
    if dout is None:
        return None, None, None, None, [None] * len(tensors), [None] * len(parameters), *nothing
    dx, *shares = _backward(dout, x, out, lse, ends, ticket, tensors, parameters, *ctx.call)
    dsinks = None if sinks is None else sinks_gradient(dout, out, local_lse, sinks)
    return dx, dsinks, None, None, [None] * len(tensors), shares, *nothing


_forward.register_autograd(_differentiate, setup_context=_setup)
