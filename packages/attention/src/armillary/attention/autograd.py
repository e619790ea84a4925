"""The one op pair: it runs any call's forward, and its backward, and is what autograd and `torch.compile` see.

An op in an `autograd.Function`, so that selective checkpointing can keep its results instead of attending twice, and a
compiled graph holds it without a break: there the op's kernel for autograd is that function. An op takes tensors,
numbers and text only. Outside of a graph the call reaches it by a number, that it has while the op runs; inside, as a
`Key` of which the op makes the call again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.calls import AttendsInStages, AttentionCall, ProjectedCall, head_sinks, sinks_gradient
from armillary.attention.checks import check_sinks
from armillary.attention.compiled import (
    NUMBERED,
    Key,
    NumberedMethod,
    ProjectionParts,
    autocast_dtype,
    backward_call,
    call_of,
    key_of,
    number,
    projected_gradients,
    shapes_of,
)
from armillary.attention.projections import Projections
from armillary.attention.spec import AttentionOptions, AttentionSpec
from armillary.core import compat
from armillary.core.recompute import capture_autocast

KEY = "SymInt[] numbers, float scale, float softcap, str text"
"""`Key` in an op's schema. Without text, the only number is that of a call at hand."""


class AtHand:
    """A key by which an op finds a call, within a `with` block, which holds the call. A key is its own."""

    def __init__(self, call: AttentionCall | ProjectedCall | Key) -> None:
        self.call = call

    def __enter__(self) -> Key:
        if isinstance(self.call, Key):
            return self.call
        self.number = number(self.call)
        return Key([self.number], 0.0, 0.0, "")

    def __exit__(self, *_: object) -> None:
        if not isinstance(self.call, Key):
            del NUMBERED[self.number]


def eager() -> Callable[..., Sequence[Tensor]]:
    """What runs a call outside of graphs, as `Attention.forward` takes it: out [B, T, H, Dv], lse [B, T, H], and more.

    Asked for rather than called through: it would be on the stack of every kernel.
    """
    return beside_transforms if compat.transforms_on() else cast(Any, Attention).apply


def beside_transforms(
    call: AttentionCall, mask_numbers: Tensor | None, sinks: Tensor | None, *tensors: Tensor
) -> Sequence[Tensor]:
    """The op alone, since an `autograd.Function` would be transformed, of tensors that are not to be."""
    check_transforms(*tensors, sinks)
    with AtHand(call) as key:
        return _forward(list(tensors), sinks, mask_numbers, *key)


def attend_compiled(
    method: NumberedMethod, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) while a graph is traced. The op checks the rest of the call when it runs."""
    check_sinks(sinks, q.shape[-2], q.device)
    key = key_of(method, q.shape[-1], options)
    out, lse, *_ = _forward([q, k, v], head_sinks(sinks), options.mask.numbers, *key)
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
    """Returns out of projected attention while a graph is traced, with H and K `heads`."""
    check_sinks(sinks, heads[0], x.device)
    dims = (*heads, parts.head_dim, len(parts.tensors))
    key = key_of(method, parts.head_dim, options, *dims, autocast=autocast_dtype(x))
    tensors = [x, parts.ticket, *parts.tensors, *parts.parameters]
    return _forward(tensors, head_sinks(sinks), options.mask.numbers, *key)[0]


def check_transforms(*tensors: Tensor | None) -> None:
    """Refuses tensors that are to be followed in a way that an op here cannot be: jvp would find a tangent of 0."""
    if compat.transforms_on() and any(x is not None and compat.transformed(x) for x in tensors):
        raise ValueError(
            "torch.func's transforms (jvp, grad, vjp, vmap) and forward-mode AD do not reach into attention; use "
            "backward() or torch.autograd.grad"
        )


def _run(tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key: Any) -> list[Tensor]:
    """The call's results."""
    call = call_of(Key(*key), tensors, mask_numbers) if key[-1] else NUMBERED[key[0][0]]
    return call.forward(tensors, sinks)


def _run_like(tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key: Any) -> list[Tensor]:
    if key[-1]:
        return shapes_of(Key(*key), tensors, sinks)
    return NUMBERED[key[0][0]].forward_like(tensors, sinks)


def _run_backward(
    dout: Tensor, saved: list[Tensor], shape: list[int], mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
    """The gradients of the op's tensors that have any. `shape`: tokens and heads of the call's keys."""
    call = backward_call(Key(*key), dout, saved, shape, mask_numbers) if key[-1] else NUMBERED[key[0][0]]
    return (
        projected_gradients(Key(*key), call, dout, saved)
        if isinstance(call, ProjectedCall)
        else call.backward(dout, saved)
    )


def _run_backward_like(
    dout: Tensor, saved: list[Tensor], shape: list[int], mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
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


def _differentiably(
    tensors: list[Tensor], sinks: Tensor | None, mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
    if not any(x is not None and x.requires_grad for x in (*tensors, sinks)):
        with compat.below_autograd():  # beside a transform, too, which takes no functions
            return _forward(tensors, sinks, mask_numbers, *key)
    call = Key(*key) if key[-1] else NUMBERED[key[0][0]]
    return list(cast(Any, Attention).apply(call, mask_numbers, sinks, *tensors))


_forward = compat.define_op(
    f"attention(Tensor[] tensors, Tensor? sinks, Tensor? mask_numbers, {KEY}) -> Tensor[]",
    _run,
    _run_like,
    _differentiably,
)
_backward = compat.define_op(
    f"attention_backward(Tensor dout, Tensor[] saved, SymInt[] shape, Tensor? mask_numbers, {KEY}) -> Tensor[]",
    _run_backward,
    _run_backward_like,
)


class Attention(torch.autograd.Function):
    """A call, or in a graph its key, on tensors of which q, k and v, or x and parameters, have gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall | ProjectedCall | Key,
        mask_numbers: Tensor | None,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        with AtHand(call) as key, compat.below_autograd():
            results = _forward(tensors, sinks, mask_numbers, *key)
        out, lse, *others = results
        ctx.call, ctx.count, ctx.projected = call, len(tensors), len(key.numbers) > 5
        ctx.set_materialize_grads(False)
        if ctx.projected:
            ctx.shape, saved, local = [], (tensors[0], out, lse, *tensors[1:]), (out, others[0], sinks)
        else:
            ctx.shape, saved, local = tensors[1].shape[1:3], others or (*tensors, out, lse), (out, lse, sinks)
        ctx.save_for_backward(mask_numbers, *saved, *(local if sinks is not None else ()))
        ctx.saved = len(saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, *others = grad_outputs
        if not ctx.projected:
            refuse_gradients(others, traced=isinstance(ctx.call, Key))
        if dout is None:
            return (None,) * (3 + ctx.count)
        mask_numbers, *kept = ctx.saved_tensors
        saved, local = kept[: ctx.saved], kept[ctx.saved :]
        with AtHand(ctx.call) as key:
            found = _backward(dout, saved, ctx.shape, mask_numbers, *key)
        dsinks = sinks_gradient(dout, *local) if local else None
        # x comes first, then what has no gradient, and the parameters
        return None, None, dsinks, found[0], *[None] * (ctx.count - len(found)), *found[1:]


def refuse_gradients(grads: Sequence[Tensor | None], traced: bool) -> None:
    """lse has no gradient. A graph whose caller does not use its lse is given zeros for it, and looks when it runs."""
    refusal = "lse has no gradient here; detach it before it enters a loss"
    for grad in grads:
        if grad is not None and not traced:
            raise ValueError(refusal)
        if grad is not None:
            compat.assert_later((grad == 0).all(), refusal)


class ProjectedAttention(torch.autograd.Function):
    """A call on x [B, T, E]. Parameters are saved as they are: never a copy, cast or unsharded, which FSDP frees.

    A Function around the op, because backward runs the projections under autograd, whatever kind of parameters they
    have. The op inside is what selective checkpointing can keep.
    """

    @staticmethod
    def forward(ctx: Any, call: ProjectedCall, x: Tensor, sinks: Tensor | None, *trained: Tensor) -> Tensor:
        ctx.call = call
        with AtHand(call) as key, compat.below_autograd():
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
