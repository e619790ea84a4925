"""The one op pair: it runs any call's forward, and its backward, and is what autograd and `torch.compile` see.

An op rather than an `autograd.Function`, so that selective checkpointing can keep its results instead of attending
twice, and a compiled graph holds it without a break. An op takes tensors, numbers and text only. Outside of a graph the
call reaches it by a number, that it has while the op runs; inside, as a `Key` of which the op makes the call again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.calls import AttendsInStages, AttentionCall, ProjectedCall, sinks_gradient
from armillary.attention.compiled import (
    Key,
    NumberedMethod,
    ProjectionParts,
    autocast_dtype,
    backward_call,
    call_of,
    key_of,
    projected_gradients,
    shapes_of,
)
from armillary.attention.projections import Projections
from armillary.attention.spec import AttentionOptions, AttentionSpec
from armillary.core import compat
from armillary.core.recompute import capture_autocast

KEY = "SymInt[] numbers, float scale, float softcap, str text"
"""`Key` in an op's schema. Without text, the only number is that of a call at hand."""

_numbers = count()
_at_hand: dict[int, AttentionCall | ProjectedCall] = {}


@contextmanager
def numbered(call: AttentionCall | ProjectedCall) -> Generator[Key]:
    """A key by which an op finds the call, within the block; it is never used again.

    Held there, and not by a weak reference for as long as the graph lives: in a long run, with other threads beside it,
    one to a call that lived was gone in backward.
    """
    number = next(_numbers)
    _at_hand[number] = call
    try:
        yield Key([number], 0.0, 0.0, "")
    finally:
        del _at_hand[number]


def attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]; empty unless needed) of local tensors, differentiable."""
    if compat.transforms_on():
        check_transforms(q, k, v, sinks)
    with numbered(call) as key:
        out, lse, *_ = _forward([q, k, v], sinks, None, *key)
    while call.started:  # the op has not run: a checkpoint had its results
        call.started.pop()()
    return out, lse


def attend_compiled(
    method: NumberedMethod, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The same while a graph is traced."""
    out, lse, *_ = _forward([q, k, v], sinks, options.mask.numbers, *key_of(method, q.shape[-1], options))
    return out, lse


def attend_projected(
    method: AttendsInStages, spec: AttentionSpec, x: Tensor, projections: Projections, sinks: Tensor | None
) -> Tensor:
    """out [B, T, H, Dv], differentiable in x, sinks and the projections' parameters."""
    call = ProjectedCall(method, spec, projections, capture_autocast(x.device.type))
    return cast(Tensor, cast(Any, ProjectedAttention).apply(call, x, sinks, *call.trained()))


def attend_projected_compiled(
    method: NumberedMethod,
    x: Tensor,
    heads: Sequence[int],
    parts: ProjectionParts,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """The same while a graph is traced, with H and K `heads`."""
    dims = (*heads, parts.head_dim, len(parts.tensors))
    key = key_of(method, parts.head_dim, options, *dims, autocast=autocast_dtype(x))
    return _forward([x, parts.ticket, *parts.tensors, *parts.parameters], sinks, options.mask.numbers, *key)[0]


def check_transforms(*tensors: Tensor | None) -> None:
    """Refuses tensors that are to be followed in a way that an op here cannot be: jvp would find a tangent of 0."""
    if compat.transforms_on() and any(x is not None and compat.transformed(x) for x in tensors):
        raise ValueError(
            "torch.func's transforms (jvp, grad, vjp, vmap) and forward-mode AD do not reach into attention; use "
            "backward() or torch.autograd.grad"
        )


@torch.library.custom_op(
    "armillary::attention",
    mutates_args=(),
    schema=f"(Tensor[] tensors, Tensor? sinks, Tensor? mask_numbers, {KEY}) -> Tensor[]",
)
def _forward(tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key: Any) -> list[Tensor]:
    """The call's results."""
    call = call_of(Key(*key), tensors, mask_numbers) if key[-1] else _at_hand[key[0][0]]
    return call.forward(tensors, sinks)


@_forward.register_fake
def _(tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key: Any) -> list[Tensor]:
    if key[-1]:
        return shapes_of(Key(*key), tensors, sinks)
    return _at_hand[key[0][0]].forward_like(tensors, sinks)


@torch.library.custom_op(
    "armillary::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor[] saved, SymInt[] shape, Tensor? mask_numbers, {KEY}) -> Tensor[]",
)
def _backward(
    dout: Tensor, saved: list[Tensor], shape: list[int], mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
    """The gradients of the op's tensors that have any. `shape`: tokens and heads of the call's keys."""
    call = backward_call(Key(*key), dout, saved, shape, mask_numbers) if key[-1] else _at_hand[key[0][0]]
    return (
        projected_gradients(Key(*key), call, dout, saved)
        if isinstance(call, ProjectedCall)
        else call.backward(dout, saved)
    )


@_backward.register_fake
def _(dout: Tensor, saved: list[Tensor], shape: list[int], mask_numbers: Tensor | None, *key: Any) -> list[Tensor]:
    if not shape:
        x, _, _, _, *made_of = saved
        return [x.new_empty(x.shape), *(y.new_empty(y.shape) for y in made_of[int(key[0][8]) :])]
    q, k, v, *_ = saved
    batch, tokens, heads, _ = dout.shape
    return [
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, *shape, k.shape[3])),
        v.new_empty((batch, *shape, v.shape[3])),
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, sinks, mask_numbers, *key = inputs
    out, lse, *others = output
    ctx.key, ctx.call, ctx.count = Key(*key), None if key[-1] else _at_hand[key[0][0]], len(tensors)
    ctx.projected = len(key[0]) > 5
    ctx.set_materialize_grads(False)
    if ctx.projected:
        ctx.shape, saved, local = [], (tensors[0], out, lse, *tensors[1:]), (out, others[0], sinks)
    else:
        ctx.shape, saved, local = list(tensors[1].shape[1:3]), tuple(others or (*tensors, out, lse)), (out, lse, sinks)
    ctx.save_for_backward(mask_numbers, *saved, *(local if sinks is not None else ()))
    ctx.saved = len(saved)


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    dout, *others = grads
    if not ctx.projected:
        refuse_gradients(others, traced=ctx.call is None)
    if dout is None:
        return [None] * ctx.count, *[None] * 6
    mask_numbers, *kept = ctx.saved_tensors
    saved, local = kept[: ctx.saved], kept[ctx.saved :]
    if ctx.call is None:
        found = _backward(dout, saved, ctx.shape, mask_numbers, *ctx.key)
    else:
        with numbered(ctx.call) as key:
            found = _backward(dout, saved, ctx.shape, mask_numbers, *key)
    # x comes first, then what has no gradient, and the parameters
    grads = [found[0], *[None] * (ctx.count - len(found)), *found[1:]]
    return grads, sinks_gradient(dout, *local) if local else None, *[None] * 5


def refuse_gradients(grads: Sequence[Tensor | None], traced: bool) -> None:
    """lse has no gradient. A graph whose caller does not use its lse is given zeros for it, and looks when it runs."""
    refusal = "lse has no gradient here; detach it before it enters a loss"
    for grad in grads:
        if grad is not None and not traced:
            raise ValueError(refusal)
        if grad is not None:
            compat.assert_later((grad == 0).all(), refusal)


_forward.register_autograd(_differentiate, setup_context=_setup)


class ProjectedAttention(torch.autograd.Function):
    """A call on x [B, T, E]. Parameters are saved as they are: never a copy, cast or unsharded, which FSDP frees.

    A Function around the op, because backward runs the projections under autograd, whatever kind of parameters they
    have. The op inside is what selective checkpointing can keep.
    """

    @staticmethod
    def forward(ctx: Any, call: ProjectedCall, x: Tensor, sinks: Tensor | None, *trained: Tensor) -> Tensor:
        ctx.call = call
        with numbered(call) as key:
            out, lse, local_lse = _forward([x], sinks, None, *key)
        ctx.save_for_backward(x, sinks, out, lse, local_lse, *trained)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dout,) = grad_outputs
        x, sinks, out, lse, local_lse, *_ = ctx.saved_tensors
        dx = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        shares = ctx.call.differentiate(dout, x, dx, out, lse)
        dsinks = sinks_gradient(dout, out, local_lse, sinks) if ctx.needs_input_grad[2] else None
        return None, dx, dsinks, *shares
