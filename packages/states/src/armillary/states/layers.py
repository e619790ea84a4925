"""Layers with a state: the gated delta rule and state space duality, over sequences that are sharded across ranks.

Both compute S_t = a_t S_{t-1} + k_t u_t^T and o_t = S_t^T q_t (`chunks.py`), with different `Operands`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import check_tensor, compat, define_pair, number, traced_axis
from armillary.states.chunks import Operands, StateKernel, choose_kernel
from armillary.states.scan import Scan, ScanCall
from armillary.states.scan_plan import ScanPlan, plan_scan, segments_of_rows


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    layout: SequenceLayout | None = None,
    axis: DeviceMesh | Axis | None = None,
    mask: AttentionMask | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    kernel: str | StateKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464); with a decay for each key channel, Kimi's KDA.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t

    Args:
        q, k: [B, T, K, Dk], this rank's tokens; L2-normalized by the caller. Value head h uses key head h // (H / K).
        v: [B, T, H, Dv].
        g: [B, T, H], or [B, T, H, Dk] for a decay for each key channel; -inf is a decay of 0.
        beta: [B, T, H].
        layout: the shards of the sequence, over the ranks of the axis. None: the T tokens are the sequence.
        axis: a 1-D mesh, such as `mesh["ring"]`. None for one rank.
        mask: causal documents: the state is 0 at the start of each. Or a tree: a segment starts from the state after
            its parent's last token. None: each row is one document.
        initial_state: [B, H, Dk, Dv], the state before position 0, the same on all ranks. It enters only the first
            document of each row. Its gradient is this rank's share of a sum.
        scale: 1 / sqrt(Dk) by default.
        kernel: a kernel, or the name of one; by default "fla" if it supports the inputs, otherwise "torch".

    Returns:
        (o [B, T, H, Dv] in the dtype of v, final [B, H, Dk, Dv]): final is the state after the last token of each row,
        on every rank. The gradients that ranks pass for it are summed. States are float32, or float64 if an input other
        than initial_state is. For DTensors see `run_on_dtensors`.

    Bytes sent by each of P ranks, kind "all_gather": 4 H Dk (P - 1) (Dv n_states + Dk n_maps), where n_states and
    n_maps are those of the rank that sends most, over all B rows; 8 instead of 4 for float64. Backward sends the
    gradients of the other ranks' states and maps, kind "reduce_scatter". To count states and maps, cut a rank's shard
    of each row into runs at the boundaries of spans and segments. The rank sends the state after a run if a run on
    another rank follows it, or if the row ends there. It also sends a map with this state if the run follows a run of
    another rank, directly or after further runs of its own.

    Raises:
        ValueError: arguments that do not fit each other; a striped layout, which puts adjacent tokens on different
            ranks (`relayout` the inputs first); a mask other than causal documents or a tree; a kernel that does not
            support the inputs. Raised before any communication.
    """
    options = StateOptions(layout, axis, mask, kernel, scale)
    return _run("gated_delta_rule", options, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, initial_state)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    Bm: Tensor,
    Cm: Tensor,
    *,
    layout: SequenceLayout | None = None,
    axis: DeviceMesh | Axis | None = None,
    mask: AttentionMask | None = None,
    initial_state: Tensor | None = None,
    kernel: str | StateKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """State space duality (Mamba-2, arXiv 2405.21060), without the layer's skip term and gate.

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t Bm_t^T,    y_t = h_t Cm_t

    Args:
        x: [B, T, H, D], this rank's tokens.
        dt: [B, T, H], above 0: after the softplus.
        A: [H], below 0; the same on every rank of the axis. Its gradient is this rank's share of a sum.
        Bm, Cm: [B, T, G, Ns]. Head h uses group h // (H / G).
        layout, axis, mask: as in `gated_delta_rule`.
        initial_state: [B, H, D, Ns]; as in `gated_delta_rule`.
        kernel: a kernel, or the name of one; by default "mamba_ssm" if it supports the inputs, otherwise "torch".

    Returns:
        (y [B, T, H, D] in the dtype of x, final [B, H, D, Ns]), as `gated_delta_rule`.

    Bytes sent: as `gated_delta_rule`, with 4 H (P - 1) (D Ns n_states + n_maps) in forward.

    Raises:
        ValueError: as `gated_delta_rule`.
    """
    options = StateOptions(layout, axis, mask, kernel)
    out, final = _run("ssd", options, {"x": x, "dt": dt, "A": A, "Bm": Bm, "Cm": Cm}, initial_state)
    return out, final.mT  # the scan has states [Ns, D]


def _run(
    layer: str, options: StateOptions, inputs: Mapping[str, Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    tensors = list(inputs.values())
    if any(compat.is_dtensor(x) for x in (*tensors, initial_state)):
        out, final = run_on_dtensors(layer, options, inputs, initial_state)
    elif torch.compiler.is_compiling():
        out, final = trace_scan(layer, options, tensors, initial_state)
    else:
        out, final = run_local(layer, options, tensors, initial_state)
    return out.to(tensors[RECURRENCES[layer].value_index].dtype), final


# -- a checked call ---------------------------------------------------------------------------------------------------


class StateOptions(NamedTuple):
    """The arguments of a layer that are not tensors. Only the delta rule has `scale`."""

    layout: SequenceLayout | None
    axis: DeviceMesh | Axis | None
    mask: AttentionMask | None
    kernel: str | StateKernel | None
    scale: float | None = None


def delta_rule_call(options: StateOptions, *inputs: Tensor, initial_state: Tensor | None) -> ScanCall:
    q, k, v, g, beta = inputs
    _check_dims(("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, None), ("beta", beta, 3))
    (batch, tokens, heads, _), key_heads, channels = v.shape, k.shape[2], k.shape[3]
    _check_shapes(
        ("q", q, k.shape),
        ("k", k, (batch, tokens, key_heads, channels)),
        ("g", g, (batch, tokens, heads, *((channels,) if g.ndim == 4 else ()))),
        ("beta", beta, (batch, tokens, heads)),
        ("initial_state", initial_state, (batch, heads, channels, v.shape[3])),
    )
    _check_groups("k", key_heads, heads)
    scale = channels**-0.5 if options.scale is None else number("scale", options.scale)
    kernel = choose_kernel(options.kernel, v, channels, delta_rule=True)
    axis, plan = _plan(options, v, kernel)
    return ScanCall(partial(_delta_rule_operands, scale), kernel, plan, axis)


def ssd_call(options: StateOptions, *inputs: Tensor, initial_state: Tensor | None) -> ScanCall:
    x, dt, A, Bm, Cm = inputs
    _check_dims(("x", x, 4), ("dt", dt, 3), ("A", A, 1), ("Bm", Bm, 4), ("Cm", Cm, 4))
    (batch, tokens, heads, width), groups, states = x.shape, Bm.shape[2], Bm.shape[3]
    _check_shapes(
        ("dt", dt, (batch, tokens, heads)),
        ("A", A, (heads,)),
        ("Bm", Bm, (batch, tokens, groups, states)),
        ("Cm", Cm, Bm.shape),
        ("initial_state", initial_state, (batch, heads, width, states)),
    )
    _check_groups("Bm", groups, heads)
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


def run_local(
    layer: str, options: StateOptions, inputs: Sequence[Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a layer on local tensors. Returns (out [B, T, H, Dv] in the states' dtype, final [B, H, Dk, Dv])."""
    call = RECURRENCES[layer].checked_call(options, *inputs, initial_state=initial_state)
    return cast("tuple[Tensor, Tensor]", Scan.apply(call, *inputs, initial_state))


def _delta_rule_operands(
    scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> Operands:
    # u_t = beta_t (v_t - (a_t S_{t-1})^T k_t)
    dtype = v.dtype
    states = state_dtype((q, k, v, g, beta))
    q, k, v, g, beta = (x.to(states) for x in (q, k, v, g, beta))
    if initial_state is not None:
        initial_state = initial_state.to(v.dtype)
    decays = g if g.ndim == 4 else g.unsqueeze(-1)  # one decay for all channels of a head
    return Operands(q * scale, k, v, decays, beta.unsqueeze(-1), None, initial_state, dtype)


def _ssd_operands(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, initial_state: Tensor | None) -> Operands:
    # q = C, k = B, u_t = dt_t x_t, log a_t = dt_t A
    dtype = x.dtype
    states = state_dtype((x, dt, A, Bm, Cm))
    x, dt, rates, Bm, Cm = (operand.to(states) for operand in (x, dt, A, Bm, Cm))
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype).mT  # [Ns, D], keys first
    return Operands(Cm, Bm, x, (dt * rates).unsqueeze(-1), dt.unsqueeze(-1), rates, initial_state, dtype)


def state_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def _plan(options: StateOptions, v: Tensor, kernel: StateKernel) -> tuple[Axis | None, ScanPlan]:
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
    for name, x, dims in tensors:
        check_tensor(name, x)
        if x.ndim not in ((3, 4) if dims is None else (dims,)):
            raise ValueError(f"{name} {tuple(x.shape)}: {dims or '3 or 4'} dims are needed")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} is {x.dtype}; a floating-point dtype is needed")
        if x.device != tensors[0][1].device:
            raise ValueError(f"{name} is on {x.device}, {tensors[0][0]} on {tensors[0][1].device}")


def _check_shapes(*tensors: tuple[str, Tensor | None, Sequence[int]]) -> None:
    for name, x, shape in tensors:
        if x is not None:
            check_tensor(name, x)
            if tuple(x.shape) != tuple(shape):
                raise ValueError(f"{name} {tuple(x.shape)}: {tuple(shape)} is needed")


def _check_groups(name: str, groups: int, heads: int) -> None:
    if not groups or heads % groups:
        raise ValueError(f"{name} has {groups} heads, which must divide the {heads} heads of the values")


# -- in a compiled graph ----------------------------------------------------------------------------------------------


def trace_scan(
    layer: str, options: StateOptions, inputs: list[Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a call while a graph is traced, as an op. Returns (outputs [B, T, H, Dv], states [B, H, Dk, Dv])."""
    # The ops check the call and run it as in eager mode. Masks and layouts are inputs of the graph, so one graph serves
    # all of them.
    layout, axis, mask, kernel, scale = options
    if mask is not None and not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"mask is a {type(mask).__name__}; an attention mask of documents or a tree is accepted")
    if kernel is not None and not isinstance(kernel, str):
        raise ValueError(f"torch.compile takes the name of a kernel; got {kernel}")
    axis, scale = None if axis is None else traced_axis(axis), None if scale is None else float(scale)
    out, final, _ = _scan([*inputs, initial_state], layer, layout, axis, mask, kernel, scale)
    return out, final


def _call(tensors: Sequence[Any], layer: str, *options: Any) -> ScanCall:
    *inputs, initial_state = tensors
    return RECURRENCES[layer].checked_call(StateOptions(*options), *inputs, initial_state=initial_state)


def _run_forward(tensors: Sequence[Tensor], *call: Any) -> list[Tensor]:
    out, final, gathered = _call(tensors, *call).forward(tensors)
    return [out, final, final.new_empty(0) if gathered is None else gathered]


def _empty_outputs(inputs: Sequence[Tensor], layer: str) -> list[Tensor]:
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
    # The number of gathered elements depends on the mask: a dynamic size, known only when the graph runs.
    return [out, final, final.new_empty(0 if is_local else torch.library.get_ctx().new_dynamic_size())]


def _run_backward(grads: Sequence[Tensor | None], saved: Sequence[Tensor], layer: str, *options: Any) -> list[Tensor]:
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
    _run_forward,
    _run_backward,
    _fake,
    _fake_backward,
    lambda tensors, results: (*tensors, results[2]),
    outputs=2,
)


# -- on DTensors ------------------------------------------------------------------------------------------------------

STATE_DIMS = {0: 0, 2: 1}
"""Batch and heads: dims of tokens [B, T, H, ...] by dims of states [B, H, ...]."""


@compat.outside_graphs
def run_on_dtensors(
    layer: str, options: StateOptions, inputs: Mapping[str, Tensor], initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a layer on DTensors over a mesh that has the axis.

    All inputs with a token dim have the same placements: `Shard(1)` on the axis, with the shard sizes that DTensor
    computes; on other axes `Shard(2)` (heads, if the axis divides H and K), `Shard(0)` (batch) or `Replicate`. In the
    global view, tokens are in the order of the layout's shards. Gradients have the placements of their tensors. The
    mask is that of this rank's rows of the batch.

    Args:
        inputs: by name. "A" is [H]: a local tensor of this rank's heads, or a DTensor with `Shard(0)` on the axes that
            shard heads and `Replicate` on the others. Its gradient is `Partial` on axes that shard batch or tokens.
        initial_state: [B, H, ...]: a local tensor of this rank's rows and heads, or a DTensor with `Shard(0)` and
            `Shard(1)` on the axes that shard batch and heads, and `Replicate` on the sequence axis, on which its
            gradient is `Partial`.

    Returns:
        (out, with the placements of the inputs; final state [B, H, Dk, Dv], with those of `initial_state`).
    """
    from armillary.core.internal import dtensor  # DTensor's import takes seconds

    without_tokens = {"A": inputs.get("A"), "initial_state": initial_state}
    tokens = dtensor.check_kinds({name: x for name, x in inputs.items() if name not in without_tokens}, without_tokens)
    dtensor.check_alike(tokens)
    axes = [] if options.axis is None else [Axis.of(options.axis)]
    # `run_local` raises if the layout has another number of shards.
    layout = options.layout
    sizes = layout.sizes if layout is not None and axes and layout.shards == axes[0].size else None
    for name, x in tokens.items():
        dtensor.check_tokens_and_heads(name, x, axes, sizes)
    # Tensors without tokens, [H] and [B, H, ...], beside tokens [B, T, H, ...].
    first_name, first = next(iter(tokens.items()))
    local_tensors = {name: dtensor.local_of(x) for name, x in tokens.items()}
    for name, dims in (("A", {2: 0}), ("initial_state", STATE_DIMS)):
        x = without_tokens[name]
        if compat.is_dtensor(x):
            dtensor.check_beside(name, x, first_name, first, dims)
            x = dtensor.local_of(x, dtensor.sharding_axes(first))
        if x is not None:
            local_tensors[name] = x
    state = local_tensors.get("initial_state")
    local_out, local_final = run_local(layer, options, [local_tensors[name] for name in inputs], state)
    tensors, recurrence = list(inputs.values()), RECURRENCES[layer]
    values, keys = tensors[recurrence.value_index], tensors[recurrence.key_index]
    if axes and axes[0].size > 1:  # `final` is replicated on the axis
        local_final = cast(Tensor, _GradientOfFirstRank.apply(local_final, axes[0].rank == 0))
    final_shape = (values.shape[0], values.shape[2], keys.shape[3], values.shape[3])
    state_placements = dict(enumerate(dtensor.placements_beside(first, STATE_DIMS)))
    final = dtensor.result_like(first, local_final, final_shape, state_placements)
    return dtensor.result_like(first, local_out, values.shape), final


class _GradientOfFirstRank(torch.autograd.Function):
    # The gradient of a replicated DTensor is complete on every rank, but the layer's backward sums gradients of the
    # final state over ranks: it is kept on one.
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None
