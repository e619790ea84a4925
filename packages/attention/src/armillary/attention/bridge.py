"""The one bridge to autograd: a `torch.library` op that runs any method's forward, and one for its backward.

An op rather than an `autograd.Function`: selective checkpointing can then keep its results, and a compiled block has no
graph break around it. An op takes tensors and numbers only, so the method and the call reach it as the handle of a
`Plan`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from armillary.attention.call import Call, Saved
from armillary.attention.merge import wide
from armillary.core.ledger import phase

if TYPE_CHECKING:
    from armillary.attention.method import Method


@dataclass(frozen=True, eq=False)
class Plan:
    """A method and a call, findable by number as long as somebody holds the plan: the caller, or the autograd graph."""

    method: Method
    call: Call
    with_lse: bool

    alive: ClassVar[WeakValueDictionary[int, Plan]] = WeakValueDictionary()
    lock: ClassVar[threading.Lock] = threading.Lock()

    @property
    def handle(self) -> int:
        with self.lock:
            self.alive[id(self)] = self
        return id(self)

    @property
    def parts(self) -> tuple[Method, Call, bool]:
        return self.method, self.call, self.with_lse


def attend(method: Method, q: Tensor, k: Tensor, v: Tensor, call: Call, with_lse: bool) -> tuple[Tensor, Tensor]:
    """`method` on local tensors, differentiable: (out [B, T, H, Dv], lse [B, T, H]; empty unless `with_lse`)."""
    plan = Plan(method, call, with_lse)
    out, lse, *_ = _forward(q, k, v, plan.handle)
    return out, lse


@torch.library.custom_op("armillary::attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, plan: int) -> list[Tensor]:
    """[out, lse, *saved]; saved is there only where the method saves others than q, k, v, out and lse themselves."""
    method, call, with_lse = Plan.alive[plan].parts
    out, saved = method.forward(q, k, v, call)
    if not method.moves:
        return [out, saved.lse]
    # The local lse costs communication where the method moves its tensors: only when asked for.
    lse = method.local_lse(saved, call) if with_lse else saved.lse.new_empty(0)
    return [out, lse, *saved]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, plan: int) -> list[Tensor]:
    method, call, with_lse = Plan.alive[plan].parts
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3] if with_lse or not method.moves else (0,), dtype=wide(q.dtype))
    return [out, lse, *(method.saved_like(q, k, v, call) if method.moves else ())]


@torch.library.custom_op("armillary::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: int
) -> tuple[Tensor, Tensor, Tensor]:
    method, call, _ = Plan.alive[plan].parts
    with phase("backward"):
        return method.backward(dout, Saved(q, k, v, out, lse), call)


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = dout.shape
    key_heads = 1 + max(Plan.alive[plan].call.key_heads)
    return (
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, tokens, key_heads, k.shape[3])),
        v.new_empty((batch, tokens, key_heads, v.shape[3])),
    )


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Sequence[Tensor]) -> None:
    q, k, v, plan = inputs
    out, lse, *saved = output
    ctx.plan = Plan.alive[plan]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(saved or (q, k, v, out, lse)))


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    if any(grad is not None for grad in grads[1:]):
        raise ValueError("lse has no gradient here; detach it before it enters a loss")
    if grads[0] is None:
        return None, None, None, None
    return *_backward(grads[0], *ctx.saved_tensors, ctx.plan.handle), None


_forward.register_autograd(_differentiate, setup_context=_setup)
