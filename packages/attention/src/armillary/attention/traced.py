"""Attention inside `torch.compile`: one opaque op for the call and one for its gradient, without a graph break.

Under the tracer nothing may depend on Python objects but what it can guard: numbers, strings and tensors. So a layout
goes into the op as text, which makes it part of what the graph was compiled for; a mask as its numbers, and documents
as a tensor, so that other documents need no other graph; and a method as its number. When the op runs it does what the
call would have done outside of a graph, checks included.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from armillary.attention import bridge
from armillary.attention.kernels import KERNELS, Kernel
from armillary.attention.mask import AttentionMask
from armillary.attention.spec import Saved
from armillary.core import SequenceLayout
from armillary.core.accumulate import accumulation_dtype

if TYPE_CHECKING:
    from armillary.attention.methods.base import Method

NUMBERED: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Methods, and what makes projections, by number, for as long as somebody else holds them."""
_numbers = count()


def number(what: object) -> int:
    """Takes it in; its number is never given to anything else."""
    given = next(_numbers)
    NUMBERED[given] = what
    return given


def ticket(what: object) -> Tensor:
    """Its number as a tensor: graphs are compiled for the numbers that a module has, but for any values of tensors."""
    return torch.tensor(number(what), device="cpu")


OPTIONS = (
    "SymInt method, bool causal, SymInt left, SymInt right, str layout, str key_layout, float scale, float softcap, "
    "str kernel, bool with_lse"
)
"""`Options` in an op's schema."""


class Options(NamedTuple):
    """A call, but for its tensors, in what an op may take. For None stand -1 of a window, 0 of softcap and ""."""

    method: int
    causal: bool
    left: int
    right: int
    layout: str
    key_layout: str
    scale: float
    softcap: float
    kernel: str
    with_lse: bool


def attend(
    method: Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | None,
    scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
    kernel: str | Kernel | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse; empty unless `return_lse`): what a traced call of `method` becomes."""
    options = options_of(method, mask, layout, key_layout, q.shape[-1], scale, softcap, kernel, return_lse)
    out, lse, *_ = _forward(q, k, v, sinks, mask.ends, *options)
    return out, lse


def options_of(
    method: Method,
    mask: AttentionMask,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | None,
    head_dim: int,
    scale: float | None,
    softcap: float | None,
    kernel: str | Kernel | None,
    return_lse: bool,
) -> Options:
    """The call in what an op may take.

    Raises:
        ValueError: a kernel that has no name by which an op finds it.
    """
    if kernel is not None and not isinstance(kernel, str) and not any(kernel is known for known in KERNELS):
        raise ValueError(f"torch.compile takes kernels of {', '.join(known.name for known in KERNELS)}; got {kernel}")
    left, right = mask.window or (None, None)
    return Options(
        method.number,
        mask.causal,
        -1 if left is None else left,
        -1 if right is None else right,
        "" if layout is None else layout.text,
        "" if key_layout is None else key_layout.text,
        head_dim**-0.5 if scale is None else float(scale),
        softcap or 0.0,
        (kernel if isinstance(kernel, str) else kernel.name) if kernel else "",
        return_lse,
    )


@lru_cache(maxsize=256)
def layout_of(text: str) -> SequenceLayout | None:
    return SequenceLayout.read(text) if text else None


def plan(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ends: Tensor | None, options: Options) -> bridge.Plan:
    """What `Method.__call__` makes of the same call, checked as it does."""
    method: Method = NUMBERED[int(options.method)]
    mask = mask_of(options, ends)
    layouts = layout_of(options.layout), layout_of(options.key_layout)
    call = method.call(q, k, v, options.softcap or None, mask, *layouts, options.scale, sinks, options.kernel or None)
    return bridge.Plan(method, call, options.with_lse)


def mask_of(options: Options, ends: Tensor | None) -> AttentionMask:
    left, right = (None if side == -1 else side for side in (options.left, options.right))
    return AttentionMask(options.causal, (left, right), None if ends is None else documents_of(ends))


def documents_of(ends: Tensor) -> list[int] | list[list[int]]:
    """From `AttentionMask.ends` back to boundaries."""
    rows: list[Any] = ends.tolist()
    return rows if ends.ndim == 1 else [[end for end in row if end >= 0] for row in rows]


@torch.library.custom_op(
    "armillary::traced_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? ends, {OPTIONS}) -> Tensor[]",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ends: Tensor | None, *options: Any) -> list[Tensor]:
    """As `armillary::attention`."""
    return bridge.forward(plan(q, k, v, sinks, ends, Options(*options)), q, k, v, sinks)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ends: Tensor | None, *options: Any) -> list[Tensor]:
    method: Method = NUMBERED[int(options[0])]
    if method.moves:
        return bridge.forward_like(shapes(q, k, v, sinks, options), q, k, v, sinks)
    return [q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))]


def shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Sequence[Any]) -> bridge.Plan:
    """The plan as far as it can be known while tracing: whatever the mask is, for nothing's shape depends on it.

    Its checks make the graph one for these very sizes, so it is asked for only where tensors move: shapes of what is
    saved then follow from the layout.
    """
    known = Options(*options)._replace(causal=True, left=-1, right=-1)
    return plan(q, k, v, sinks, None, known)


@torch.library.custom_op(
    "armillary::traced_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, SymInt[] shape, Tensor? ends, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    shape: Sequence[int],
    ends: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `armillary::attention_backward`. `shape`: tokens and heads of the call's keys."""
    found = call_of(dout, q, k, v, shape, ends, Options(*options))
    return bridge.backward(found, dout, Saved(q, k, v, out, lse))


@_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    shape: list[int],
    ends: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = dout.shape
    return (
        q.new_empty((batch, tokens, heads, q.shape[3])),
        k.new_empty((batch, *shape, k.shape[3])),
        v.new_empty((batch, *shape, v.shape[3])),
    )


def call_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int], ends: Tensor | None, options: Options
) -> bridge.Plan:
    """The plan of the forward call, whose own tensors may be elsewhere by now: found from their shapes."""
    key_shape = (dout.shape[0], *shape)
    q, k, v = (
        x.new_empty(1).expand(*sizes, x.shape[3]) for sizes, x in ((dout.shape[:3], q), (key_shape, k), (key_shape, v))
    )
    return plan(q, k, v, None, ends, options)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    q, k, v, sinks, ends, *options = inputs
    out, lse, *saved = output
    ctx.shape, ctx.options, ctx.local = list(k.shape[1:3]), options, sinks is not None
    ctx.set_materialize_grads(False)
    local = (out, lse, sinks) if sinks is not None else ()
    ctx.save_for_backward(ends, *(saved or (q, k, v, out, lse)), *local)


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    bridge.check_gradients(grads)
    nothing = [None] * (1 + len(ctx.options))
    dout = grads[0]
    if dout is None:
        return None, None, None, None, *nothing
    ends, q, k, v, out, lse, *local = ctx.saved_tensors
    dq, dk, dv = _backward(dout, q, k, v, out, lse, ctx.shape, ends, *ctx.options)
    return dq, dk, dv, bridge.sinks_gradient(dout, *local) if local else None, *nothing


_forward.register_autograd(_differentiate, setup_context=_setup)
