"""Calls inside `torch.compile`: what an op may take, and the call that it makes of that when it runs.

Under the tracer nothing may depend on Python objects but what it can guard: numbers, strings and tensors. So a layout
goes into the op as text, which makes it part of what the graph was compiled for; a mask as its numbers, and documents
as a tensor, so that other documents need no other graph; and a method as its number. When the op runs it makes the call
as it would have been made outside of a graph, checks included.

Projections are not traced. The op is given the number of what makes them, which must be there before, and makes them
when it runs: of tensors that are inputs of the graph, and of parameters as they are then, which FSDP may have swapped.
The parameters are inputs too, so that their gradients have somewhere to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import count
from operator import index
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from armillary.attention.calls import Attends, AttendsInStages, AttentionCall, ProjectedCall, results_like
from armillary.attention.kernels import KERNELS
from armillary.attention.mask import AttentionMask, Window
from armillary.attention.mask.numbers import mask_of_numbers
from armillary.attention.projections import Projections
from armillary.attention.spec import AttentionOptions, AttentionSpec
from armillary.core import SequenceLayout, compat
from armillary.core.accumulate import accumulation_dtype

NUMBERED: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Methods, what makes projections, and calls that are being run, by number, for as long as somebody else holds them."""
_numbers = count()

DTYPES = {None: "", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def number(what: object) -> int:
    """Takes it in; its number is never given to anything else."""
    given = next(_numbers)
    NUMBERED[given] = what
    return given


def ticket(what: object) -> Tensor:
    """Its number as a tensor: graphs are compiled for the numbers that a module has, but for any values of tensors."""
    return torch.tensor(number(what), device="cpu")


class NumberedMethod(Attends, Protocol):
    """A method as a graph finds it, and has it check a call."""

    number: int

    def check_call(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
    ) -> AttentionSpec: ...


class Key(NamedTuple):
    """A call, but for its tensors, in what an op may take.

    Args:
        numbers: of the method; causal; the window, -1 for None; with_lse; and where q, k and v are made of x, H, K, D
            and how many tensors projections are made of.
        scale, softcap: as `AttentionOptions`; 0 for no softcap.
        text: layouts, kernel and autocast's dtype, each empty for None.
    """

    numbers: Sequence[int]
    scale: float
    softcap: float
    text: str


def key_of(
    method: NumberedMethod, head_dim: int, options: AttentionOptions, *projected: int, autocast: str = ""
) -> Key:
    """The call in what an op may take.

    Raises:
        ValueError: a kernel that has no name by which an op finds it.
    """
    mask, kernel = options.mask, options.kernel
    if kernel is not None and not isinstance(kernel, str) and not any(kernel is known for known in KERNELS):
        raise ValueError(f"torch.compile takes kernels of {', '.join(known.name for known in KERNELS)}; got {kernel}")
    left, right = (-1 if side is None else side for side in mask.window or (None, None))
    layout = "" if options.layout is None else options.layout.text
    key_layout = "" if options.key_layout is None else options.key_layout.text
    name = "" if kernel is None else kernel if isinstance(kernel, str) else kernel.name
    return Key(
        [method.number, int(mask.causal), left, right, int(options.return_lse), *projected],
        head_dim**-0.5 if options.scale is None else float(options.scale),
        options.softcap or 0.0,
        f"{layout}|{key_layout}|{name}|{autocast}",
    )


def options_of(key: Key, mask_numbers: Tensor | None) -> AttentionOptions:
    """What the caller asked for."""
    _, causal, *sides = (int(value) for value in key.numbers[:4])
    left, right = (None if side == -1 else side for side in sides)
    mask = mask_of(bool(causal), (left, right), None if mask_numbers is None else mask_numbers.numpy().tobytes())
    layout, key_layout, kernel, _ = key.text.split("|")
    layouts, with_lse = (read_layout(layout), read_layout(key_layout)), bool(key.numbers[4])
    return AttentionOptions(mask, *layouts, key.scale, key.softcap or None, kernel or None, with_lse)


@lru_cache(maxsize=256)
def read_layout(text: str) -> SequenceLayout | None:
    return SequenceLayout.read(text) if text else None


@lru_cache(maxsize=16)
def mask_of(causal: bool, window: Window, numbers: bytes | None) -> AttentionMask:
    """The mask whose `numbers` these are: one for all layers and both ways of a step."""
    found = None if numbers is None else np.frombuffer(numbers, dtype=np.int64).tolist()
    return AttentionMask(causal, window) if found is None else mask_of_numbers(causal, window, found)


def call_of(key: Key, tensors: Sequence[Tensor], mask_numbers: Tensor | None) -> AttentionCall | ProjectedCall:
    """The call, of tensors of these shapes."""
    return (
        projected_call(key, tensors, mask_numbers)
        if len(key.numbers) > 5
        else attention_call(key, tensors, mask_numbers)
    )


def attention_call(key: Key, tensors: Sequence[Tensor], mask_numbers: Tensor | None) -> AttentionCall:
    """What `Method.__call__` makes of the same call, checked as it does."""
    method: NumberedMethod = NUMBERED[int(key.numbers[0])]
    q, k, v = tensors
    options = options_of(key, mask_numbers)
    return AttentionCall(method, method.check_call(q, k, v, None, options), options.return_lse)


def shapes_of(key: Key, tensors: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """Empty tensors shaped as the results, as far as can be known while tracing: nothing's shape depends on the mask.

    Checks make the graph one for these very sizes, so they are done only where shapes follow from the layout.
    """
    known = key._replace(numbers=[key.numbers[0], 1, -1, -1, *key.numbers[4:]])
    if len(key.numbers) > 5:
        in_stages, spec, q = projected_spec(known, tensors[0], None)
        return results_like(in_stages, spec, tensors[0], q, q, sinks)
    method: NumberedMethod = NUMBERED[int(key.numbers[0])]
    if method.redistributes_inputs:  # tokens, heads and dims as numbers, not as symbols
        tensors = [x.new_empty((x.shape[0], *map(index, x.shape[1:]))) for x in tensors]
        return attention_call(known, tensors, None).forward_like(tensors, sinks)
    q, _, v = tensors
    return [q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))]


def backward_call(
    key: Key, dout: Tensor, saved: Sequence[Tensor], shape: Sequence[int], mask_numbers: Tensor | None
) -> AttentionCall | ProjectedCall:
    """The forward call, whose own q, k and v may be elsewhere by now: found from their shapes.

    Args:
        shape: tokens and heads of the call's keys.
    """
    if len(key.numbers) > 5:
        x, _, _, *made_of = saved
        return projected_call(key, [x, *made_of], mask_numbers)
    q, k, v, *_ = saved
    key_shape = (dout.shape[0], *shape)
    like = ((dout.shape[:3], q), (key_shape, k), (key_shape, v))
    return attention_call(key, [x.new_empty(1).expand(*sizes, x.shape[3]) for sizes, x in like], mask_numbers)


# -- projections ------------------------------------------------------------------------------------------------------


class Projector(Protocol):
    """What makes projections. Numbered (`number`) before anything is traced."""

    def projections_of(self, tensors: Sequence[Tensor]) -> Projections:
        """The projections whose `tensors` these are, with parameters as they are now."""
        ...


class ProjectionParts(NamedTuple):
    """What projections are made of, as an op takes it.

    Args:
        ticket: of their `Projector` (`ticket`).
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

    def parts(self) -> ProjectionParts | None:
        """What makes them again, with the same numbers; None if that cannot be promised."""
        ...


def autocast_dtype(x: Tensor) -> str:
    """The name of the dtype that autocast has projections of `x` computed in, if it is on."""
    kind = x.device.type
    lowered = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return DTYPES[torch.get_autocast_dtype(kind)] if lowered else ""


def projected_call(key: Key, tensors: Sequence[Tensor], mask_numbers: Tensor | None) -> ProjectedCall:
    """What `Method.projected` makes of the same call, of tensors x, ticket, and those that projections are made of."""
    x, its_ticket, *made_of = tensors
    projector: Projector = NUMBERED[int(its_ticket.item())]
    method, spec, _ = projected_spec(key, x, mask_numbers)
    projections = projector.projections_of(made_of[: int(key.numbers[8])])
    return ProjectedCall(method, spec, projections, partial(as_then, x.device.type, key))


def projected_spec(key: Key, x: Tensor, mask_numbers: Tensor | None) -> tuple[AttendsInStages, AttentionSpec, Tensor]:
    """(method, the call checked, a tensor shaped as q) of hidden states x."""
    method: NumberedMethod = NUMBERED[int(key.numbers[0])]
    heads, key_heads, dim = key.numbers[5:8]
    one = x.new_empty(1, dtype=projected_dtype(key) or x.dtype)
    q, k = (one.expand(*x.shape[:2], n, dim) for n in (heads, key_heads))
    return cast(AttendsInStages, method), method.check_call(q, k, k, None, options_of(key, mask_numbers)), q


def projected_dtype(key: Key) -> torch.dtype | None:
    """What autocast lowered projections to when the op was called, if it was on."""
    name = key.text.rpartition("|")[2]
    return getattr(torch, name) if name else None


def as_then(device_type: str, key: Key) -> AbstractContextManager[Any]:
    """Autocast as it was when the op was called."""
    dtype = projected_dtype(key)
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def projected_gradients(key: Key, call: ProjectedCall, dout: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
    """[dx, the gradients of the parameters], where `saved` is x, out, lse, ticket, tensors, parameters."""
    x, out, lse, _, *made_of = saved
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with compat.above_autograd():
        shares = call.differentiate(dout, x, dx, out, lse)
    parameters = made_of[int(key.numbers[8]) :]
    return [dx, *(local(share, parameter) for share, parameter in zip(shares, parameters, strict=True))]


def local(share: Tensor | None, parameter: Tensor) -> Tensor:
    """The gradient of what this rank has of a parameter, in memory of its own."""
    if share is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    mine = share.to_local() if compat.is_dtensor(share) else share
    return mine.to(parameter.dtype).clone(memory_format=torch.contiguous_format)
