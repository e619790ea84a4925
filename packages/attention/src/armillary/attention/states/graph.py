"""Layers with a state inside `torch.compile` without a graph break: an op, and the op of its backward pass.

Ops take only tensors, numbers and strings (`ScanKey`), and rebuild and check the call when the graph runs. Documents
and trees are passed as a tensor, so one graph serves all of them. The number of gathered elements depends on the mask,
so it is a dynamic size, known only when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.call.graph_key import read_layout
from armillary.attention.mask import AttentionMask
from armillary.attention.states.calls import RECURRENCES, StateOptions, state_dtype
from armillary.attention.states.scan import ScanCall
from armillary.core.parts import axis_of, compat, own_memory, traced_axis

KEY_SCHEMA = "str layer, str axis, str group, str layout, str kernel, float scale, SymInt[] sides"


class ScanKey(NamedTuple):
    """The arguments of a call that are not tensors, as arguments of the op: `KEY_SCHEMA`.

    Args:
        axis, group: names of the axis and of its process group; "" without an axis.
        layout, kernel: "" for None.
        sides: `AttentionMask.sides`; documents and trees are in a tensor.
    """

    layer: str
    axis: str
    group: str
    layout: str
    kernel: str
    scale: float
    sides: Sequence[int]

    def call(self, inputs: Sequence[Tensor], initial_state: Tensor | None, mask_numbers: Tensor | None) -> ScanCall:
        """Returns the checked call on these tensors."""
        options = StateOptions(
            read_layout(self.layout),
            axis_of(self.axis, self.group, inputs[0]) if self.group else None,
            AttentionMask.read(self.sides, mask_numbers),
            self.kernel or None,
            self.scale,
        )
        return RECURRENCES[self.layer].checked_call(options, *inputs, initial_state=initial_state)

    def empty_results(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns empty tensors with the shapes and dtype of the outputs and the final states."""
        recurrence, dtype = RECURRENCES[self.layer], state_dtype(inputs)
        values, keys = inputs[recurrence.value_index], inputs[recurrence.key_index]
        batch, _, heads, width = values.shape
        return [
            values.new_empty(values.shape, dtype=dtype),
            values.new_empty((batch, heads, keys.shape[3], width), dtype=dtype),
        ]


def trace_scan(
    layer: str, options: StateOptions, inputs: list[Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a call while a graph is traced. Returns (outputs [B, T, H, Dv], states [B, H, Dk, Dv])."""
    mask, kernel = AttentionMask() if options.mask is None else options.mask, options.kernel
    if not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"mask is a {type(mask).__name__}; an attention mask of documents or a tree is accepted")
    if kernel is not None and not isinstance(kernel, str):
        raise ValueError(f"torch.compile takes the name of a kernel; got {kernel}")
    axis = None if options.axis is None else traced_axis(options.axis)
    channels = inputs[RECURRENCES[layer].key_index].shape[3]
    key = ScanKey(
        layer,
        "" if axis is None else axis.name,
        "" if axis is None else axis.group,
        "" if options.layout is None else options.layout.text,
        kernel or "",
        channels**-0.5 if options.scale is None else float(options.scale),
        list(mask.sides),
    )
    out, final, _ = _scan(inputs, initial_state, mask.numbers, *key)
    return out, final


def _run_forward(
    inputs: list[Tensor], initial_state: Tensor | None, mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
    """Returns outputs, final states and gathered elements, which are empty on one rank. No result is a view."""
    out, final, gathered = ScanKey(*key).call(inputs, initial_state, mask_numbers).forward([*inputs, initial_state])
    return [*map(own_memory, (out, final)), final.new_empty(0) if gathered is None else own_memory(gathered)]


def _fake_forward(
    inputs: list[Tensor], initial_state: Tensor | None, mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
    """Returns empty results of `_run_forward`, for tracing."""
    scan_key = ScanKey(*key)
    out, final = scan_key.empty_results(inputs)
    layout = read_layout(scan_key.layout)
    is_local = layout is None or layout.shards == 1
    return [out, final, final.new_empty(0 if is_local else torch.library.get_ctx().new_dynamic_size())]


def _run_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    initial_state: Tensor | None,
    gathered: Tensor,
    mask_numbers: Tensor | None,
    *key: Any,
) -> list[Tensor]:
    """Returns the gradients of the inputs, and of the initial state if there is one."""
    call = ScanKey(*key).call(inputs, initial_state, mask_numbers)
    tensors = [*inputs, initial_state]
    # An op runs below autograd, but backward recomputes the chunks with autograd.
    with compat.above_autograd():
        tensor_grads = call.backward(grads, tensors, gathered)
    return [
        own_memory(torch.zeros_like(x) if grad is None else grad)
        for x, grad in zip(tensors, tensor_grads, strict=True)
        if x is not None
    ]


def _fake_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    initial_state: Tensor | None,
    gathered: Tensor,
    mask_numbers: Tensor | None,
    *key: Any,
) -> list[Tensor]:
    """Returns empty results of `_run_backward`, for tracing."""
    return [x.new_empty(x.shape) for x in (*inputs, initial_state) if x is not None]


def _scan_with_autograd(
    inputs: list[Tensor], initial_state: Tensor | None, mask_numbers: Tensor | None, *key: Any
) -> list[Tensor]:
    """The op's autograd kernel."""
    if not any(x is not None and x.requires_grad for x in (*inputs, initial_state)):
        with compat.below_autograd():
            return _scan(inputs, initial_state, mask_numbers, *key)
    return list(cast(Any, _TracedScan).apply(ScanKey(*key), mask_numbers, initial_state, *inputs))


_scan = compat.define_op(
    f"state_scan(Tensor[] inputs, Tensor? initial_state, Tensor? mask_numbers, {KEY_SCHEMA}) -> Tensor[]",
    _run_forward,
    _fake_forward,
    _scan_with_autograd,
)
_scan_backward = compat.define_op(
    "state_scan_backward(Tensor[] grads, Tensor[] inputs, Tensor? initial_state, Tensor gathered, "
    f"Tensor? mask_numbers, {KEY_SCHEMA}) -> Tensor[]",
    _run_backward,
    _fake_backward,
)


class _TracedScan(torch.autograd.Function):
    """`scan._Scan` for graphs: forward runs the op below autograd, backward runs the backward op."""

    @staticmethod
    def forward(
        ctx: Any, key: ScanKey, mask_numbers: Tensor | None, initial_state: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        with compat.below_autograd():  # above it, the op would dispatch to its autograd kernel, which is this function
            out, final, gathered = _scan(list(inputs), initial_state, mask_numbers, *key)
        ctx.key = key
        ctx.save_for_backward(mask_numbers, initial_state, gathered, *inputs)
        ctx.mark_non_differentiable(gathered)
        # Autograd would otherwise create a zero gradient for `gathered`, whose size is not known while tracing.
        ctx.set_materialize_grads(False)
        return out, final, gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask_numbers, initial_state, gathered, *inputs = ctx.saved_tensors
        results = ctx.key.empty_results(inputs)
        grads = [
            torch.zeros_like(x) if grad is None else grad for x, grad in zip(results, grad_outputs[:2], strict=True)
        ]
        input_grads = _scan_backward(grads, inputs, initial_state, gathered, mask_numbers, *ctx.key)
        if initial_state is None:
            return None, None, None, *input_grads
        return None, None, input_grads[-1], *input_grads[:-1]
