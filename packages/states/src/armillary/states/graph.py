"""Layers with a state inside `torch.compile` without a graph break: an op, and the op of its backward pass.

The ops check the call and run it as in eager mode. Masks and layouts are inputs of the graph, so one graph serves all
of them. The number of gathered elements depends on the mask, so it is a dynamic size, known only when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.attention import AttentionMask
from armillary.core import Axis
from armillary.core.parts import compat, define_pair, traced_axis
from armillary.states.calls import RECURRENCES, StateOptions, state_dtype
from armillary.states.scan import ScanCall


def trace_scan(
    layer: str, options: StateOptions, inputs: list[Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a call while a graph is traced. Returns (outputs [B, T, H, Dv], states [B, H, Dk, Dv])."""
    layout, axis, mask, kernel, scale = options
    if mask is not None and not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"mask is a {type(mask).__name__}; an attention mask of documents or a tree is accepted")
    if kernel is not None and not isinstance(kernel, str):
        raise ValueError(f"torch.compile takes the name of a kernel; got {kernel}")
    axis, scale = None if axis is None else traced_axis(axis), None if scale is None else float(scale)
    out, final, _ = _scan([*inputs, initial_state], layer, layout, axis, mask, kernel, scale)
    return out, final


def _call(tensors: Sequence[Any], layer: str, *options: Any) -> ScanCall:
    """Returns the checked call on the inputs of a layer and its initial state or None."""
    *inputs, initial_state = tensors
    return RECURRENCES[layer].checked_call(StateOptions(*options), *inputs, initial_state=initial_state)


def _run(tensors: Sequence[Tensor], *call: Any) -> list[Tensor]:
    """Returns outputs, final states and gathered elements, which are empty on one rank."""
    out, final, gathered = _call(tensors, *call).forward(tensors)
    return [out, final, final.new_empty(0) if gathered is None else gathered]


def _empty_outputs(inputs: Sequence[Tensor], layer: str) -> list[Tensor]:
    """Returns empty tensors with the shapes and dtype of the outputs and the final states."""
    recurrence, dtype = RECURRENCES[layer], state_dtype(inputs)
    values, keys = inputs[recurrence.value_index], inputs[recurrence.key_index]
    batch, _, heads, width = values.shape
    return [
        values.new_empty(values.shape, dtype=dtype),
        values.new_empty((batch, heads, keys.shape[3], width), dtype=dtype),
    ]


def _fake(tensors: Sequence[Tensor], layer: str, layout: None, axis: Axis | None, *_: Any) -> list[Tensor]:
    out, final = _empty_outputs(tensors[:-1], layer)
    is_local = axis is None or axis.size == 1
    return [out, final, final.new_empty(0 if is_local else torch.library.get_ctx().new_dynamic_size())]


def _run_backward(grads: Sequence[Tensor | None], saved: Sequence[Tensor], layer: str, *options: Any) -> list[Tensor]:
    """Returns the gradients of the inputs, and of the initial state if there is one."""
    *tensors, gathered = saved
    output_grads = [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(_empty_outputs(tensors[:-1], layer), grads, strict=True)
    ]
    # An op runs below autograd, but backward recomputes the chunks with autograd.
    with compat.above_autograd():
        tensor_grads = _call(tensors, layer, *options).backward(output_grads, tensors, gathered)
    return [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(tensors, tensor_grads, strict=True)
        if x is not None  # pyright: ignore[reportUnnecessaryComparison] - the initial state
    ]


def _fake_backward(grads: Sequence[Tensor | None], saved: Sequence[Tensor | None], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in saved[:-1] if x is not None]


_scan = define_pair(
    "state_scan",
    _run,
    _run_backward,
    _fake,
    _fake_backward,
    lambda tensors, results: (*tensors, results[2]),
    outputs=2,
)
