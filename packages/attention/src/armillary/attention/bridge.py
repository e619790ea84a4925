"""The one bridge to autograd: a `torch.library` op that runs any method's forward, and one for its backward.

An op rather than an `autograd.Function`, so that selective checkpointing can keep its results instead of attending
twice. An op takes tensors and numbers only, so the method and the call reach it as the number of a `Plan`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from armillary.attention.spec import Call, Saved
from armillary.core import compat
from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.compiled import alone
from armillary.core.collectives.merge import pivot
from armillary.core.observe.ledger import phase
from armillary.core.recompute import outside_autocast

if TYPE_CHECKING:
    from armillary.attention.methods.base import Method


_numbers = count()


@dataclass(frozen=True, eq=False)
class Plan:
    """A method, a call, and what waits for what the method has sent already."""

    method: Method
    call: Call
    with_lse: bool
    started: list[Any] = field(default_factory=list[Any])

    at_hand: ClassVar[dict[int, Plan]] = {}

    @contextmanager
    def numbered(self) -> Generator[int]:
        """A number by which an op finds the plan, within the block; it is never used again.

        Held there, and not by a weak reference for as long as the graph lives: in a long run, with other threads beside
        it, one to a plan that lived was gone in backward.
        """
        number = next(_numbers)
        self.at_hand[number] = self
        try:
            yield number
        finally:
            del self.at_hand[number]


def attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The plan on local tensors, differentiable: (out [B, T, H, Dv], lse [B, T, H]; empty unless `with_lse`)."""
    check_transforms(q, k, v, sinks)
    with plan.numbered() as number:
        out, lse, *_ = _forward(q, k, v, sinks, number)
    while plan.started:  # the op has not run: a checkpoint had its results
        plan.started.pop()()
    return out, lse


def check_transforms(*tensors: Tensor | None) -> None:
    """Refuses tensors that are to be followed in a way that an op here cannot be: jvp would find a tangent of 0."""
    if compat.transforms_on() and any(x is not None and compat.transformed(x) for x in tensors):
        raise ValueError(
            "torch.func's transforms (jvp, grad, vjp, vmap) and forward-mode AD do not reach into attention; use "
            "backward() or torch.autograd.grad"
        )


@torch.library.custom_op("armillary::attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: int) -> list[Tensor]:
    return forward(Plan.at_hand[plan], q, k, v, sinks)


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    """[out, lse, *saved]; saved is there only where the method saves others than q, k, v, out and lse themselves."""
    with outside_autocast(q.device.type):
        return [alone(x) for x in _results(plan, q, k, v, sinks)]


def _results(plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    method, call = plan.method, plan.call
    out, saved = method.resume(plan.started.pop() if plan.started else None, q, k, v, call)
    # The local lse costs communication where the method moves its tensors: only when it is needed.
    lse = method.local_lse(saved, call) if needs_lse(plan, sinks) else saved.lse.new_empty(0)
    if sinks is not None:
        heads = method.heads(range(q.shape[2]))
        inner_out, inner_lse = sunk(saved.out, saved.lse, sinks[heads.start : heads.stop])
        saved = saved._replace(out=inner_out, lse=inner_lse)
        out, lse = sunk(out, lse, sinks) if method.moves else (inner_out, inner_lse)
    return [out, lse, *saved] if method.moves else [out, lse]


def needs_lse(plan: Plan, sinks: Tensor | None) -> bool:
    """Whether the lse of this rank's own tokens is among the results."""
    return plan.with_lse or sinks is not None or not plan.method.moves


def sunk(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) as if each query also saw a key with score `sinks` [H] and value 0 (sinks, as in gpt-oss).

    A sink of -inf is none; a query that sees no key has nothing else.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - pivot(total)).exp().unsqueeze(-1)).to(out.dtype), total


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: int) -> list[Tensor]:
    return forward_like(Plan.at_hand[plan], q, k, v, sinks)


def forward_like(plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    """Empty tensors shaped as those of `forward`."""
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3] if needs_lse(plan, sinks) else (0,), dtype=accumulation_dtype(q.dtype))
    return [out, lse, *(plan.method.saved_like(q, k, v, plan.call) if plan.method.moves else ())]


@torch.library.custom_op("armillary::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: int
) -> tuple[Tensor, Tensor, Tensor]:
    return backward(Plan.at_hand[plan], dout, Saved(q, k, v, out, lse))


def backward(plan: Plan, dout: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), in the dtypes of q, k and v."""
    with phase("backward"), outside_autocast(dout.device.type):
        dq, dk, dv = plan.method.backward(dout, saved, plan.call)
    dq, dk, dv = (alone(dx.to(x.dtype)) for dx, x in zip((dq, dk, dv), saved, strict=False))
    return dq, dk, dv


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: int
) -> tuple[Tensor, Tensor, Tensor]:
    found = Plan.at_hand[plan]
    batch, tokens, heads, _ = dout.shape
    key_shape = (batch, found.method.key_tokens(found.call), 1 + max(found.call.key_heads))
    return (
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((*key_shape, k.shape[3])),
        v.new_empty((*key_shape, v.shape[3])),
    )


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int], output: Sequence[Tensor]) -> None:
    q, k, v, sinks, plan = inputs
    out, lse, *saved = output
    ctx.plan = Plan.at_hand[plan]
    ctx.set_materialize_grads(False)
    local = (out, lse, sinks) if sinks is not None else ()
    ctx.save_for_backward(*(saved or (q, k, v, out, lse)), *local)


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    check_gradients(grads)
    dout = grads[0]
    if dout is None:
        return None, None, None, None, None
    q, k, v, out, lse, *local = ctx.saved_tensors
    with ctx.plan.numbered() as number:
        dq, dk, dv = _backward(dout, q, k, v, out, lse, number)
    return dq, dk, dv, sinks_gradient(dout, *local) if local else None, None


def check_gradients(grads: Sequence[Tensor | None]) -> None:
    """Refuses a gradient of anything but out."""
    if any(grad is not None for grad in grads[1:]):
        raise ValueError("lse has no gradient here; detach it before it enters a loss")


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """dsinks [H] of this rank's tokens; like any parameter's, it is to be summed over ranks."""
    weight = (sinks.to(lse.dtype) - pivot(lse)).exp()
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 1)).to(sinks.dtype)


_forward.register_autograd(_differentiate, setup_context=_setup)
