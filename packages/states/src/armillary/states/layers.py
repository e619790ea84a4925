"""Layers with a state: the gated delta rule and state space duality, over sequences that are sharded across ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.parts import compat
from armillary.states.calls import RECURRENCES, StateOptions, run_layer
from armillary.states.chunks import StateKernel
from armillary.states.graph import trace_scan


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
    """Runs a layer: on DTensors, traced into a compiled graph, or on local tensors.

    Returns:
        (out [B, T, H, Dv] in the dtype of the values, final [B, H, Dk, Dv]).
    """
    if any(compat.is_dtensor(x) for x in (*inputs.values(), initial_state)):
        from armillary.states.dtensors import run_on_dtensors  # DTensor's import takes seconds

        out, final = run_on_dtensors(layer, options, inputs, initial_state)
    elif torch.compiler.is_compiling():
        out, final = trace_scan(layer, options, list(inputs.values()), initial_state)
    else:
        out, final = run_layer(layer, options, list(inputs.values()), initial_state)
    values = list(inputs.values())[RECURRENCES[layer].value_index]
    return out.to(values.dtype), final
