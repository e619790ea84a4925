"""Memory: a step compared with its simulation, savings of UPipe's stages, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method, Projected, Ulysses, UPipe
from armillary.attention.internal import Inputs, Kernel, choose_kernel
from armillary.models.internal import HeadProjections
from gpu.arithmetic import FORWARD, RECOMPUTED, attention_flops, causal_pairs, step_flops
from gpu.check import Check, Row, Setting
from gpu.model import POLICIES, TINY, cut

WITHIN = 0.05
RESERVE = 5 * 2**30
DIM = 128


def chosen_kernel(setting: Setting, dim: int) -> Kernel:
    """The kernel chosen for bfloat16 on this device."""
    x = torch.empty(1, 1, 1, dim, dtype=torch.bfloat16, device=setting.device.torch)
    return choose_kernel(Inputs.of(x, x))


def check_memory(setting: Setting) -> Iterator[Row]:
    """Peak memory of steps of a shortened 8B model, simulated and measured."""
    from armillary.plan.memory import AttentionChoice, Job, SimulatedFlash, estimate, simulate

    config = cut(setting)
    kernel = chosen_kernel(setting, config.head_dim)
    simulated = SimulatedFlash(version=3 if kernel.name == "flash_attn_3" else 2)
    for name, length in product_of(setting):
        policy = POLICIES[name]
        job = Job(model=config, axes={}, attention=AttentionChoice("local"), length=length, checkpointing=policy)
        expected = (estimate(job) if name == "none" else simulate(replace(job, kernel=simulated))).device
        with setting.alone() as mesh:
            peak = setting.device.peak(partial(one_step, replace(job, kernel=kernel), mesh))
        label, source = (
            f"{name}, {length:,} tokens",
            "closed formulas" if name == "none" else "armillary.plan's simulation",
        )
        within = abs(peak.allocated / expected - 1) <= WITHIN
        bar = f"{expected / 2**30:.2f} within {WITHIN:.0%}"
        yield Row(f"{label}: allocated", peak.allocated / 2**30, "GiB", bar, source, None if setting.fake else within)
        spare = (peak.reserved - peak.allocated) / 2**30
        yield setting.at_most(f"{label}: reserved beyond that", spare, RESERVE / 2**30, "GiB", "the planner's reserve")


def product_of(setting: Setting) -> list[tuple[str, int]]:
    """(policy, sequence length) of the steps."""
    names = ("none", "layer", "attention_output", "layer, offloaded", "attention_output, offloaded")
    lengths = setting.size((8192, 32_768), (64,))
    return [(name, length) for length in lengths for name in names[: setting.size(None, 2)]]


def one_step(job: Any, mesh: DeviceMesh) -> None:
    """Runs the simulated step on the device."""
    from armillary.plan.memory import SimulatedStep

    step = SimulatedStep.of(job, mesh)
    optimizer = step.allocate_state()
    step.train_step(optimizer)


def check_upipe(setting: Setting) -> Iterator[Row]:
    """Temporary memory of q, k, v and out in a forward pass from hidden states, of UPipe and of Ulysses."""
    for heads, key_heads, saved in ((64, 8, 0.778), (64, 64, 0.875))[: setting.size(None, 1)]:
        full = 2 * heads + 2 * key_heads
        for name, bar in (("UPipe, stages of 8", saved - 0.01), ("Ulysses", None)):
            with setting.one_of(ulysses=8) as mesh:
                axis = mesh["ulysses"]
                method = Ulysses(axis) if bar is None else UPipe(axis, heads_per_stage=8)
                heads_at_once = intermediates(setting, method, heads, key_heads)
            label = f"{name}, H {heads}, K {key_heads}: {heads_at_once:.1f} heads at once, saved of {full}"
            source = "UPipe (arXiv 2602.21196): (2 S + 2 min(K, S)) / (2 H + 2 K) are left"
            saved_fraction = 1 - heads_at_once / full
            yield (
                Row(label, saved_fraction) if bar is None else setting.at_least(label, saved_fraction, bar, "", source)
            )


def intermediates(setting: Setting, method: Method, heads: int, key_heads: int) -> float:
    """Peak temporary memory, in heads of a rank's tokens, without x, weights, the full out and lse."""
    tokens, width, place = setting.size(16_384, 64), 64, {"dtype": torch.bfloat16, "device": setting.device.torch}
    outputs = list[torch.Tensor]()
    query, key, value = (nn.Linear(width, n * DIM, bias=False, **place) for n in (heads, key_heads, key_heads))
    source = HeadProjections(query, key, value, heads, key_heads, DIM)
    x = torch.zeros(1, tokens, width, **place)
    mask, layout = AttentionMask(), method.layout(8 * tokens)

    def work() -> None:
        outputs.clear()
        if isinstance(method, UPipe):
            outputs.extend(
                method.attend(Projected(x, source), method.check_projected(x, source, mask=mask, layout=layout))
            )
        else:
            outputs.append(method.projected(x, source, mask=mask, layout=layout))

    with torch.no_grad():
        work()  # libraries allocate workspaces in the first call
        outputs.clear()
        peak = setting.device.peak(work).allocated
    return (peak - sum(x.nbytes for x in outputs)) / (tokens * DIM * 2)


ROOM = 36 * 2**30
"""Bytes that the longest sequence may use. The step that fills an H100 would take 2.5 minutes."""


def length_job(setting: Setting, kernel: Kernel | None = None) -> Any:
    """LLaMA-3-8B on one rank of eight, without offloading."""
    from armillary.models import Checkpointing, LlamaConfig
    from armillary.plan.memory import AttentionChoice, Job

    return Job(
        model=setting.size(LlamaConfig.llama3_8b(), TINY),
        axes={"ulysses": 8},
        attention=AttentionChoice("upipe"),
        length=8192,
        checkpointing=Checkpointing("attention_output"),
        kernel=kernel,
    )


def check_length(setting: Setting) -> Iterator[Row]:
    """A step at 95% of the longest sequence that should fit, beside a tensor that leaves it `ROOM`."""
    from armillary.plan.memory import SimulatedFlash, estimate, simulate
    from armillary.plan.memory.room import Room, longest_fit

    kernel, memory = chosen_kernel(setting, DIM), setting.device.memory
    room = Room(setting.size(min(ROOM, memory - RESERVE), 2**21), 2**50)
    job = length_job(setting, SimulatedFlash(version=3 if kernel.name == "flash_attn_3" else 2))
    step, start = setting.size((8192, 2**18), (128, 256))

    def predict(length: int) -> Any:
        return estimate(replace(job, length=length))

    fit = longest_fit(lambda length: simulate(replace(job, length=length)), predict, room, step, start)
    yield Row("longest by the planner", fit.length, "tokens", source=f"{room.device / 2**30:.4g} GiB")
    length = int(0.95 * fit.length) // step * step
    occupied = setting.size(memory - RESERVE - room.device, 0)
    ballast = torch.empty(occupied, dtype=torch.uint8, device=setting.device.torch)
    with setting.one_of(ulysses=8) as mesh:
        peak = setting.device.peak(partial(one_step, replace(job, length=length, kernel=kernel), mesh))
    del ballast
    label = f"a step of {length:,} tokens, 95% of it: reserved"
    limit = memory - occupied
    source = "the device's memory less other tensors: it did not run out"
    yield Row(label, peak.reserved / 2**30, "GiB", f"at most {limit / 2**30:.4g}", source, peak.reserved <= limit)


def memory_flops(setting: Setting) -> float:
    return sum(RECOMPUTED * step_flops(cut(setting), length) for _, length in product_of(setting))


def upipe_flops(setting: Setting) -> float:
    """Forward of both methods twice, with 64 heads on 8 ranks. Projections from 64 channels are less."""
    tokens = setting.size(16_384, 64)
    return 2 * 2 * 2 * attention_flops(causal_pairs(8 * tokens), FORWARD, 64 // 8)


def length_flops(setting: Setting) -> float:
    """A step of as many tokens as if weights, their gradients, two moments and saved tensors alone filled the room."""
    job, ranks = length_job(setting), 8
    config, room = job.model, setting.size(ROOM, 2**21)
    state = 16 * config.parameters() / ranks
    saved = config.layers * 2 * 2 * config.dim  # per token: x and attention's output, in 16 bits
    length = int(ranks * (room - state) / saved)
    return RECOMPUTED * step_flops(config, length) / ranks


CHECKS = (
    Check(
        "memory",
        "Memory of a step against its simulation",
        check_memory,
        "within 5% of the simulation",
        120,
        memory_flops,
    ),
    Check("upipe-memory", "What UPipe's stages save", check_upipe, "the paper's share, less 1%", 25, upipe_flops),
    Check(
        "length",
        "The longest sequence that fits one rank's share",
        check_length,
        "95% of the planner's",
        80,
        length_flops,
    ),
)
