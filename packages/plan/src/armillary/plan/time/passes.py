"""The time of one block's attention, forward and backward, and for a hybrid that of its layers with a state.

`passes_of` times a method's communication plan on a cluster. For a hybrid it adds the plans of recurrent layers, and of
hidden states that move between attention's layout and theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch

from armillary.attention import AttentionMask, AttentionShape, CommPlan
from armillary.attention.internal import default_margin
from armillary.attention.plans import Step
from armillary.core import SequenceLayout
from armillary.core.internal import PHASES
from armillary.models import GPTConfig, LlamaConfig, Mixer, StateConfig
from armillary.models.internal import Policy
from armillary.plan.cluster import Cluster
from armillary.plan.memory import Job
from armillary.plan.memory.latent_sizes import call_shape
from armillary.plan.time.clocks import PassTime, plan_seconds
from armillary.states import halo_comm_plan, relayout_comm_plan, state_comm_plan


def pair_flops(head_dim: int, value_dim: int) -> tuple[int, int]:
    """FLOPs of a visible (query, key) pair of a head, in forward and in backward.

    A matrix product takes 2 for each element: a multiply and an add. Forward has two products: Q K^T and P V. Backward
    has five, as FlashAttention-2 (arXiv 2307.08691) counts them: Q K^T again, dV, dP, dQ and dK.
    """
    return 2 * (head_dim + value_dim), 2 * (3 * head_dim + 2 * value_dim)


# FLOPs per visible pair, head and element of head dim, if Dv = D.
FORWARD_FLOPS, BACKWARD_FLOPS = pair_flops(1, 1)

# Products with the weight of the expansion in forward and in backward, which expands keys again and has two
# gradients: of latents and of the weight.
EXPANSION_PRODUCTS = 1, 3

# Bytes that each rank sends: (by rank in forward, by rank in backward).
SentBytes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Passes:
    """Time of one block's attention, forward and backward, and of a hybrid's other mixers.

    Args:
        overlap: True if forward sends while it computes.
        sent_bytes: bytes that each rank sends, in forward and in backward.
        sends_latents: True if latents are sent instead of keys and values.
        checkpointed: the passes under a checkpoint policy; None if they are these.
        windows: passes of attention in blocks with another window than the first block.
        states: passes of a block of each recurrent mixer.
        relayout: one move of hidden states between attention's layout and the layout of recurrent layers (forward), and
            the move of their gradients (backward).
        relayouts: number of such moves in the model's forward; its backward has as many.
    """

    forward: PassTime
    backward: PassTime
    overlap: bool = True
    sent_bytes: SentBytes = ((), ())
    sends_latents: bool = False
    checkpointed: Passes | None = None
    windows: Mapping[int | None, Passes] = field(default_factory=dict[int | None, "Passes"])
    states: Mapping[Mixer, Passes] = field(default_factory=dict[Mixer, "Passes"])
    relayout: Passes | None = None
    relayouts: int = 0

    def both(self) -> PassTime:
        return self.forward + self.backward

    def at(self, mixer: Mixer, window: int | None, policy: Policy) -> Passes:
        """Returns the passes of a block with this mixer and window under a checkpoint policy."""
        passes = self.states.get(mixer) or self.windows.get(window, self)
        return (passes.checkpointed if policy != "none" else None) or passes


def passes_of(
    job: Job,
    cluster: Cluster,
    layout: str = "zigzag",
    kernel: str | None = None,
    margin: int | None = None,
    mask: AttentionMask | None = None,
) -> Passes:
    """Returns the time of a block's attention in forward and backward, and for a hybrid that of its other mixers.

    Args:
        layout: layout of the sequence over the ring.
        kernel: name of the kernel; by default the fastest that torch ships.
        margin: multiprocessors that a persistent kernel leaves to NCCL; None: `default_margin`.
        mask: mask of the rows of a rank; by default causal. Blocks narrow it by their window.
    """
    model, mask = job.model, mask or AttentionMask()
    ring, ulysses, tp = (job.axes.get(name, 1) for name in ("ring", "ulysses", "tp"))
    # 1. Attention, under the window of each block.
    has_states = isinstance(model, LlamaConfig) and model.states is not None and not job.contiguous_states
    key_layout = job.method.layout(job.length, ring, layout, mask, has_states)
    windows = {
        # A window includes the query's own key.
        window: attention_passes(job, cluster, key_layout, kernel, margin, mask.narrow(window and window - 1))
        for window in dict.fromkeys(window_of(model, i) for i in range(model.layers))
    }
    passes = windows.pop(window_of(model, 0))
    passes = replace(passes, windows=windows)
    if not isinstance(model, LlamaConfig) or model.states is None:
        return passes
    # 2. Layers with a state. Outside of attention, ranks on the head axis divide a shard among them.
    attention_layout = key_layout if ulysses == 1 else key_layout.refine(ulysses)
    state_layout = attention_layout
    if job.contiguous_states:
        state_layout = SequenceLayout.contiguous(job.length, attention_layout.shards)
    # Assumes that computation hides no exchange of states or of the short convolution, and no move of hidden states.
    states = {
        mixer: state_passes(mixer, model.states, state_layout, cluster, job.rows, tp, job.precision, mask)
        for mixer in dict.fromkeys(model.mixers)
        if mixer != "attention"
    }
    passes = replace(passes, states=states)
    if state_layout == attention_layout:
        return passes
    # 3. With two layouts, hidden states move between them.
    plan = relayout_comm_plan(attention_layout, state_layout, job.rows * model.dim * job.precision.itemsize)
    return replace(passes, relayout=exchange_passes(plan, cluster, state_layout, tp), relayouts=relayouts(model))


def attention_passes(
    job: Job, cluster: Cluster, layout: SequenceLayout, kernel: str | None, margin: int | None, mask: AttentionMask
) -> Passes:
    """Returns the time of attention in a block that has this mask, in forward and backward; see `passes_of`."""
    model, method = job.model, job.method
    latent = model.latent if isinstance(model, LlamaConfig) else None
    ring, ulysses, tp = (job.axes.get(name, 1) for name in ("ring", "ulysses", "tp"))
    # 1. The method's communication plan, which each group of ring x ulysses ranks runs. Groups along replicate, shard
    # and tp run it at the same time and share the links between nodes.
    shape = call_shape(job, layout, mask)
    sent, checkpointed_sent = (method.as_sent(shape, ring, ulysses, checkpointed) for checkpointed in (False, True))
    comm_plan, checkpointed_plan = (
        method.comm_plan(sent, ring, ulysses),
        method.checkpointed_comm_plan(checkpointed_sent, ring, ulysses),
    )
    # 2. Its time, by the seconds of a (query, key) pair of one head: its FLOPs over the FLOP/s that the kernel attains.
    device, copies = cluster.accelerator, cluster.ranks // (ring * ulysses)
    margin = default_margin(ring) if margin is None else margin
    # If the kernel leaves NCCL no multiprocessors, forward hides no communication: NCCL's kernels start when it ends.
    overlap = margin > 0 or not device.is_persistent(kernel)
    forward_share, backward_share = device.attention_shares(job.length, kernel, margin)
    forward_flops, backward_flops = pair_flops(model.head_dim, model.value_dim)
    forward_pair = forward_flops / (device.flops * forward_share)
    backward_pair = backward_flops / (device.flops * backward_share)
    # Seconds to expand the key of a head. A rank that sends expanded keys has expanded those of its own tokens.
    key = 2 * latent.key_parameters / (device.flops * device.matmul) if latent else 0.0
    own_keys = -(-max(shape.layout.sizes) // ulysses) * job.rows * shape.kv_heads

    def time(plan: CommPlan, sent: AttentionShape, saves_expanded: bool = False) -> Passes:
        key_forward, key_backward = (key * products for products in EXPANSION_PRODUCTS)
        passes = Passes(
            plan_seconds(plan.forward, cluster, forward_pair, copies, overlap, tp, key_forward),
            plan_seconds(plan.backward, cluster, backward_pair, copies, stride=tp, seconds_per_key=key_backward),
            overlap,
            sent_bytes(plan, ring * ulysses),
            sent.latent is not None,
        )
        if sent.latent is not None:
            return passes
        before, after = PassTime(own_keys * key_forward), PassTime(own_keys * (key_backward - saves_expanded * key))
        return replace(passes, forward=passes.forward + before, backward=passes.backward + after)

    # Without checkpoints, Ulysses saves the expanded keys that a rank receives.
    passes = time(comm_plan, sent, saves_expanded=checkpointed_plan is not None)
    if checkpointed_plan is not None:
        passes = replace(passes, checkpointed=time(checkpointed_plan, checkpointed_sent))
    return passes


def window_of(model: LlamaConfig | GPTConfig, block: int) -> int | None:
    """Returns the number of keys to which a block's queries are limited."""
    return model.window_of(block) if isinstance(model, LlamaConfig) else None


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
    # Assumes that recurrences run at the speed of matrix products, with the FLOPs of a token-by-token recurrence;
    # chunked kernels compute more.
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


def sent_bytes(plan: CommPlan, ranks: int) -> SentBytes:
    """Bytes that each of a plan's ranks sends, in forward and in backward."""
    forward, backward = (tuple(plan.bytes(rank, phase=phase) for rank in range(ranks)) for phase in PHASES)
    return forward, backward
