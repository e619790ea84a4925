"""Layers with a state: the gated delta rule and state space duality, over sequences that are sharded across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.mask import AttentionMask
from armillary.attention.states.chunks import Operands, StateKernel
from armillary.attention.states.kernels import choose_kernel
from armillary.attention.states.plan import ScanPlan, plan_scan
from armillary.attention.states.scan import scan
from armillary.core import SequenceLayout, compat
from armillary.core.mesh import Axis
from armillary.core.segments import segments_of
from armillary.core.validation import check_tensor, number


@compat.outside_graphs
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
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464), or with a decay for each key channel Kimi's KDA.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t

    Args:
        q, k: [B, T, K, Dk], this rank's tokens; L2-normalized by the caller. Value head h uses key head h // (H / K).
        v: [B, T, H, Dv].
        g: [B, T, H], or [B, T, H, Dk] for a decay for each key channel; -inf is a decay of 0.
        beta: [B, T, H].
        layout: the shards of the sequence, over the ranks of the axis. None: the T tokens are the sequence.
        axis: a 1-D mesh, such as `mesh["ring"]`. None for one rank.
        mask: causal documents, at whose starts the state is 0, or a tree, where a segment goes on from its parent's
            last state. None: one document.
        initial_state: [B, H, Dk, Dv], the state before position 0, the same on all ranks. Its gradient is this rank's
            share of a sum. It enters the first document of each row only.
        scale: 1 / sqrt(Dk) by default.
        kernel: a kernel, or the name of one, "torch" or "fla"; by default the fastest that supports the inputs.

    Returns:
        (o [B, T, H, Dv], final [B, H, Dk, Dv]): final is the state after the last token of each row, on every rank. Its
        gradients add up over ranks. States are float32, or float64 if q, k or v is.

    Bytes sent by each of P ranks, kind "all_gather": (P - 1) times 4 H Dk (Dv for each state + Dk for each map) of the
    rank with most of them: it has a state for each run of its tokens that a run of another rank follows, or that ends
    the row, and a map for each of these whose first state comes from another rank. Backward the other ranks' states and
    maps, kind "reduce_scatter". A run is a span of a shard, cut at the boundaries of segments.

    Raises:
        ValueError: arguments that do not fit each other; a striped layout, whose tokens have no neighbours on their
            rank: `relayout` the inputs first; a mask that is neither of causal documents nor a tree; a kernel that does
            not support the inputs. Raised before any communication.
    """
    _check_dims(("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, None), ("beta", beta, 3))
    (batch, tokens, heads, _), key_heads, channels = v.shape, k.shape[2], k.shape[3]
    _check_shape("q", q, k.shape)
    _check_shape("k", k, (batch, tokens, key_heads, channels))
    _check_shape("g", g, (batch, tokens, heads, *((channels,) if g.ndim == 4 else ())))
    _check_shape("beta", beta, (batch, tokens, heads))
    _check_groups("k", key_heads, heads)
    _check_state(initial_state, (batch, heads, channels, v.shape[3]))
    factor = channels**-0.5 if scale is None else number("scale", scale)
    chosen = choose_kernel(kernel, v, channels, delta_rule=True)
    along, plan = _plan(layout, axis, mask, v, chosen)
    out, final = scan(partial(_delta_rule_operands, factor), chosen, plan, along, q, k, v, g, beta, initial_state)
    return out.to(v.dtype), final


@compat.outside_graphs
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
    """State space duality (Mamba-2, arXiv 2405.21060), without D x and gating.

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t Bm_t^T,    y_t = h_t Cm_t

    Args:
        x: [B, T, H, D], this rank's tokens.
        dt: [B, T, H], above 0: after the softplus.
        A: [H], below 0; whole on every rank, and its gradient is this rank's share of a sum.
        Bm, Cm: [B, T, G, Ns]. Head h uses group h // (H / G).
        layout, axis, mask: as in `gated_delta_rule`.
        initial_state: [B, H, D, Ns], as there.
        kernel: a kernel, or the name of one, "torch" or "mamba_ssm"; as there.

    Returns:
        (y [B, T, H, D], final [B, H, D, Ns]).

    Bytes sent: as there, with 4 H (D Ns for each state + 1 for each map).

    Raises:
        ValueError: as there.
    """
    _check_dims(("x", x, 4), ("dt", dt, 3), ("A", A, 1), ("Bm", Bm, 4), ("Cm", Cm, 4))
    (batch, tokens, heads, width), groups, states = x.shape, Bm.shape[2], Bm.shape[3]
    _check_shape("dt", dt, (batch, tokens, heads))
    _check_shape("A", A, (heads,))
    _check_shape("Bm", Bm, (batch, tokens, groups, states))
    _check_shape("Cm", Cm, Bm.shape)
    _check_groups("Bm", groups, heads)
    _check_state(initial_state, (batch, heads, width, states))
    chosen = choose_kernel(kernel, x, states, delta_rule=False)
    along, plan = _plan(layout, axis, mask, x, chosen)
    initial = None if initial_state is None else initial_state.mT
    out, final = scan(_ssd_operands, chosen, plan, along, x, dt, A, Bm, Cm, initial)
    return out.to(x.dtype), final.mT


def _delta_rule_operands(
    scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> Operands:
    dtype = v.dtype
    q, k, v, g, beta = _in_state_dtype(q, k, v, g, beta)
    if initial_state is not None:
        initial_state = initial_state.to(v.dtype)
    decays = g if g.ndim == 4 else g.unsqueeze(-1)
    return Operands(q * scale, k, v, decays, beta.unsqueeze(-1), None, initial_state, dtype)


def _ssd_operands(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, initial_state: Tensor | None) -> Operands:
    dtype = x.dtype
    x, dt, rates, Bm, Cm = _in_state_dtype(x, dt, A, Bm, Cm)
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype)
    return Operands(Cm, Bm, x, (dt * rates).unsqueeze(-1), dt.unsqueeze(-1), rates, initial_state, dtype)


def _in_state_dtype(*inputs: Tensor) -> list[Tensor]:
    """Casts to the dtype of the states."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    return [x.to(dtype) for x in inputs]


def _plan(
    layout: SequenceLayout | None,
    axis: DeviceMesh | Axis | None,
    mask: AttentionMask | None,
    v: Tensor,
    kernel: StateKernel,
) -> tuple[Axis | None, ScanPlan]:
    """Returns the axis and this rank's plan for v [B, T, H, Dv]."""
    batch, tokens = v.shape[:2]
    along = None if axis is None else Axis.of(axis)
    ranks, rank = (1, 0) if along is None else (along.size, along.rank)
    if layout is None:
        if along is not None and ranks > 1:
            raise ValueError(f"layout=None on {ranks} ranks of axis {along.name!r}: a SequenceLayout is needed")
        layout = SequenceLayout.contiguous(tokens, 1)
    if layout.shards != ranks:
        where = "without an axis there is 1 rank" if along is None else f"axis {along.name!r} has {ranks} ranks"
        raise ValueError(f"the layout has {layout.shards} shards; {where}")
    striped = [span for shard in range(ranks) for span in layout.spans(shard) if span.step > 1]
    if striped:
        raise ValueError(
            f"layout with {striped[0]}: a state runs along neighbouring tokens; `armillary.core.relayout` the inputs "
            "to a contiguous or zigzag layout first"
        )
    rows = segments_of(layout.length, mask=mask)
    if len(rows) not in (1, batch):
        raise ValueError(f"mask has segments of {len(rows)} rows; the batch has {batch}")
    if tokens != layout.sizes[rank]:
        raise ValueError(f"{tokens} tokens; the layout's shard {rank} has {layout.sizes[rank]}")
    return along, plan_scan(layout, rows * (batch // len(rows)), rank, v.device, kernel.max_chunk)


def _check_dims(*tensors: tuple[str, Tensor, int | None]) -> None:
    """Raises ValueError unless all are local floating-point tensors on one device with so many dims (None: 3 or 4)."""
    for name, x, dims in tensors:
        check_tensor(name, x)
        if compat.is_dtensor(x):
            raise ValueError(f"{name} is a DTensor; give this rank's tokens, {name}.to_local()")
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
