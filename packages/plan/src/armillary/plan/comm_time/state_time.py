"""Predicts time and bytes of a hybrid model's layers with a state, and of moving hidden states between two layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch

from armillary.attention import AttentionMask, CommPlan
from armillary.attention.plans import Step
from armillary.core import SequenceLayout
from armillary.models import LlamaConfig, Mixer, StateConfig
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.comm_plan_time import PassTime, plan_seconds
from armillary.plan.comm_time.step_time import Passes, sent_bytes
from armillary.states import halo_comm_plan, relayout_comm_plan, state_comm_plan


def with_states(
    passes: Passes,
    model: LlamaConfig,
    attention_layout: SequenceLayout,
    state_layout: SequenceLayout,
    cluster: Cluster,
    rows: int,
    tp: int,
    precision: torch.dtype,
    mask: AttentionMask,
) -> Passes:
    """Returns `passes`, which are those of attention, together with the passes of a hybrid's layers with a state.

    Assumes that recurrences run at the speed of matrix products, with the FLOPs of a token-by-token recurrence (chunked
    kernels compute more). Also assumes that computation hides none of these: the exchange of states, the exchange of
    the short convolution, and moves of hidden states between layouts.

    Args:
        attention_layout, state_layout: layouts of attention and of layers with a state, over the ranks of
            ring x ulysses.
        rows: sequences of a rank.

    Raises:
        ValueError: a layout that layers with a state do not support.
    """
    assert model.states is not None
    states = {
        mixer: state_passes(mixer, model.states, state_layout, cluster, rows, tp, precision, mask)
        for mixer in dict.fromkeys(model.mixers)
        if mixer != "attention"
    }
    # With one layout for all mixers, hidden states do not move.
    if state_layout == attention_layout:
        return replace(passes, states=states)
    plan = relayout_comm_plan(attention_layout, state_layout, rows * model.dim * precision.itemsize)
    return replace(
        passes, states=states, relayout=exchange_passes(plan, cluster, state_layout, tp), relayouts=relayouts(model)
    )


def relayouts(model: LlamaConfig) -> int:
    """Number of times that hidden states move in forward, from attention's layout to that of states or back."""
    # The sequence begins and ends in attention's layout.
    has_state = [False, *(model.mixer_of(i) != "attention" for i in range(model.layers)), False]
    return sum(a != b for a, b in pairwise(has_state))


@lru_cache(maxsize=1024)  # candidates that differ in the method have equal layouts
def state_passes(
    mixer: Mixer,
    states: StateConfig,
    layout: SequenceLayout,
    cluster: Cluster,
    rows: int,
    tp: int,
    precision: torch.dtype,
    mask: AttentionMask,
) -> Passes:
    """Time of a layer with a state. Its backward computes the recurrence again."""
    layer: Literal["ssd", "gated_delta_rule"] = "ssd" if mixer == "mamba2" else "gated_delta_rule"
    channels = (2 * states.keys + states.values) // tp
    halo = halo_comm_plan(layout, states.conv_width - 1, channels, precision, rows, mask)
    scan = state_comm_plan(
        layer,
        layout,
        heads=states.heads // tp,
        key_dim=states.key_dim,
        value_dim=states.value_dim,
        batch=rows,
        mask=mask,
    )
    # Forward exchanges the halo (the tokens before each run, for the short convolution), then states and maps. Backward
    # has the opposite order.
    plan = CommPlan((*halo.forward, *scan.forward), (*scan.backward, *halo.backward))
    exchanges, device = exchange_passes(plan, cluster, layout, tp), cluster.accelerator
    # `flops_per_token` counts forward once and backward twice, so a third of it is forward. The rank with the most
    # tokens determines the time.
    flops = states.flops_per_token(mixer) / 3 / tp * max(layout.sizes) * rows
    compute = flops / (device.flops * device.matmul)
    # Backward recomputes the recurrence, and differentiates it in twice the time.
    return replace(
        exchanges, forward=exchanges.forward + PassTime(compute), backward=exchanges.backward + PassTime(3 * compute)
    )


def exchange_passes(plan: CommPlan, cluster: Cluster, layout: SequenceLayout, tp: int) -> Passes:
    """Time of a plan that only communicates, and so is exposed. All groups of `layout.shards` ranks run it at once."""

    def exposed(steps: Sequence[Step]) -> PassTime:
        seconds = plan_seconds(steps, cluster, 0.0, cluster.ranks // layout.shards, stride=tp).exchange
        return PassTime(exposed=seconds, exchange=seconds)

    return Passes(exposed(plan.forward), exposed(plan.backward), sent_bytes=sent_bytes(plan, layout.shards))
