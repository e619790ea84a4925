"""Checked calls of the layers with a state: the plan, the kernel and the operands from a layer's arguments.

Both layers compute S_t = a_t S_{t-1} + k_t u_t^T and o_t = S_t^T q_t (`chunks.py`), with different `Operands`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.parts import check_tensor, number
from armillary.states.chunks import Operands, StateKernel
from armillary.states.kernels import choose_kernel
from armillary.states.plan import ScanPlan, plan_scan, segments_of_rows
from armillary.states.scan import ScanCall, scan


class StateOptions(NamedTuple):
    """The arguments of a layer that are not tensors. Only the delta rule has `scale`."""

    layout: SequenceLayout | None
    axis: DeviceMesh | Axis | None
    mask: AttentionMask | None
    kernel: str | StateKernel | None
    scale: float | None = None


def delta_rule_call(options: StateOptions, *inputs: Tensor, initial_state: Tensor | None) -> ScanCall:
    """Returns the checked call of `gated_delta_rule` on q, k, v, g, beta."""
    q, k, v, g, beta = inputs
    _check_dims(("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, None), ("beta", beta, 3))
    (batch, tokens, heads, _), key_heads, channels = v.shape, k.shape[2], k.shape[3]
    _check_shape("q", q, k.shape)
    _check_shape("k", k, (batch, tokens, key_heads, channels))
    _check_shape("g", g, (batch, tokens, heads, *((channels,) if g.ndim == 4 else ())))
    _check_shape("beta", beta, (batch, tokens, heads))
    _check_groups("k", key_heads, heads)
    _check_state(initial_state, (batch, heads, channels, v.shape[3]))
    scale = channels**-0.5 if options.scale is None else number("scale", options.scale)
    kernel = choose_kernel(options.kernel, v, channels, delta_rule=True)
    axis, plan = _plan(options, v, kernel)
    return ScanCall(partial(_delta_rule_operands, scale), kernel, plan, axis)


def ssd_call(options: StateOptions, *inputs: Tensor, initial_state: Tensor | None) -> ScanCall:
    """Returns the checked call of `ssd` on x, dt, A, Bm, Cm."""
    x, dt, A, Bm, Cm = inputs
    _check_dims(("x", x, 4), ("dt", dt, 3), ("A", A, 1), ("Bm", Bm, 4), ("Cm", Cm, 4))
    (batch, tokens, heads, width), groups, states = x.shape, Bm.shape[2], Bm.shape[3]
    _check_shape("dt", dt, (batch, tokens, heads))
    _check_shape("A", A, (heads,))
    _check_shape("Bm", Bm, (batch, tokens, groups, states))
    _check_shape("Cm", Cm, Bm.shape)
    _check_groups("Bm", groups, heads)
    _check_state(initial_state, (batch, heads, width, states))
    kernel = choose_kernel(options.kernel, x, states, delta_rule=False)
    axis, plan = _plan(options, x, kernel)
    return ScanCall(_ssd_operands, kernel, plan, axis)


class Recurrence(NamedTuple):
    """A layer with a state.

    Args:
        checked_call: checks `StateOptions`, the layer's tensors and `initial_state`, and returns the call.
        value_index: index of v [B, T, H, Dv] among the layer's tensors.
        key_index: index of k [B, T, K, Dk] among the layer's tensors.
    """

    checked_call: Callable[..., ScanCall]
    value_index: int
    key_index: int


RECURRENCES = {"gated_delta_rule": Recurrence(delta_rule_call, 2, 1), "ssd": Recurrence(ssd_call, 0, 3)}
"""The layers, by the names of their functions."""


def run_layer(
    layer: str, options: StateOptions, inputs: Sequence[Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a layer on local tensors. Returns (out [B, T, H, Dv] in the states' dtype, final [B, H, Dk, Dv])."""
    call = RECURRENCES[layer].checked_call(options, *inputs, initial_state=initial_state)
    return scan(call, *inputs, initial_state)


def _delta_rule_operands(
    scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> Operands:
    """Returns the operands of the delta rule: u_t = beta_t (v_t - (a_t S_{t-1})^T k_t)."""
    dtype = v.dtype
    q, k, v, g, beta = _in_state_dtype(q, k, v, g, beta)
    if initial_state is not None:
        initial_state = initial_state.to(v.dtype)
    decays = g if g.ndim == 4 else g.unsqueeze(-1)  # one decay for all channels of a head
    return Operands(q * scale, k, v, decays, beta.unsqueeze(-1), None, initial_state, dtype)


def _ssd_operands(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, initial_state: Tensor | None) -> Operands:
    """Returns the operands of state space duality: q = C, k = B, u_t = dt_t x_t, log a_t = dt_t A."""
    dtype = x.dtype
    x, dt, rates, Bm, Cm = _in_state_dtype(x, dt, A, Bm, Cm)
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype).mT  # [Ns, D], keys first
    return Operands(Cm, Bm, x, (dt * rates).unsqueeze(-1), dt.unsqueeze(-1), rates, initial_state, dtype)


def state_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    """Returns the dtype of the states of a layer with these inputs."""
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def _in_state_dtype(*inputs: Tensor) -> list[Tensor]:
    dtype = state_dtype(inputs)
    return [x.to(dtype) for x in inputs]


def _plan(options: StateOptions, v: Tensor, kernel: StateKernel) -> tuple[Axis | None, ScanPlan]:
    """Returns the axis and this rank's plan for v [B, T, H, Dv]."""
    (batch, tokens), layout = v.shape[:2], options.layout
    axis = None if options.axis is None else Axis.of(options.axis)
    ranks, rank = (1, 0) if axis is None else (axis.size, axis.rank)
    if layout is None:
        if axis is not None and ranks > 1:
            raise ValueError(f"layout=None on {ranks} ranks of axis {axis.name!r}: a SequenceLayout is needed")
        layout = SequenceLayout.contiguous(tokens, 1)
    if layout.shards != ranks:
        ranks_text = "without an axis there is 1 rank" if axis is None else f"axis {axis.name!r} has {ranks} ranks"
        raise ValueError(f"the layout has {layout.shards} shards; {ranks_text}")
    striped_spans = [span for spans in layout.spans_by_shard for span in spans if span.step > 1]
    if striped_spans:
        raise ValueError(
            f"layout with {striped_spans[0]}: a state runs along neighbouring tokens; `armillary.core.relayout` the "
            "inputs to a contiguous or zigzag layout first"
        )
    rows = segments_of_rows(layout, options.mask, batch)
    if tokens != layout.sizes[rank]:
        raise ValueError(f"{tokens} tokens; the layout's shard {rank} has {layout.sizes[rank]}")
    return axis, plan_scan(layout, rows * (batch // len(rows)), rank, v.device, kernel.max_chunk)


def _check_dims(*tensors: tuple[str, Tensor, int | None]) -> None:
    """Raises ValueError unless all are dense floating-point tensors on one device with these numbers of dims.

    Args:
        tensors: (name, tensor, number of dims, or None for 3 or 4).
    """
    for name, x, dims in tensors:
        check_tensor(name, x)
        if x.ndim not in ((3, 4) if dims is None else (dims,)):
            raise ValueError(f"{name} {tuple(x.shape)}: {dims or '3 or 4'} dims are needed")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} is {x.dtype}; a floating-point dtype is needed")
        if x.device != tensors[0][1].device:
            raise ValueError(f"{name} is on {x.device}, {tensors[0][0]} on {tensors[0][1].device}")


def _check_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} {tuple(x.shape)}: {tuple(shape)} is needed")


def _check_groups(name: str, groups: int, heads: int) -> None:
    if not groups or heads % groups:
        raise ValueError(f"{name} has {groups} heads, which must divide the {heads} heads of the values")


def _check_state(state: Tensor | None, shape: Sequence[int]) -> None:
    if state is not None:
        check_tensor("initial_state", state)
        _check_shape("initial_state", state, shape)
