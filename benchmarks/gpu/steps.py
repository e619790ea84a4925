"""A training step on one rank: results under every policy, throughput, offloading and compilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from armillary.core.testing import relative_error
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.activation_checkpoint.offload import OffloadedTensors
from gpu.arithmetic import RECOMPUTED, head_flops, step_flops
from gpu.check import REPEATS, Check, Row, Setting, correct, not_run
from gpu.device import CpuDevice
from gpu.model import POLICIES, SMALL, TINY, Training, cut

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Limits of the joint relative error of all gradients after two layers. The loss, a mean over tokens, has a tenth."""
FLOAT32 = "float32 on the CPU"


def check_step(setting: Setting) -> Iterator[Row]:
    """Loss and gradients under each policy compared with the CPU's, and waits of the host."""
    length, config, plain = setting.size(512, 40), setting.size(SMALL, TINY), Checkpointing()
    with Setting(CpuDevice(), setting.fake).alone() as mesh:
        exact = Training.on(mesh, config, length, plain, torch.float32)
        weights, loss, gradients = exact.weights(), float(exact.backward()), exact.gradients()
    with setting.alone() as mesh:
        for name in setting.size(tuple(POLICIES), ("attention_output, offloaded",)):
            for dtype, limit in LIMITS.items():
                label = f"{name}, {str(dtype).removeprefix('torch.')}"
                training = Training.on(mesh, config, length, POLICIES[name], dtype)
                training.take_weights(weights)
                off = abs(float(training.backward()) / loss - 1)
                yield correct(f"{label}: loss", off, limit / 10, FLOAT32)
                yield correct(f"{label}: gradients", joint_error(training.gradients(), gradients), limit, FLOAT32)
                waits = setting.device.syncs(training.backward)
                locations = f": {', '.join(sorted(set(waits))[:3])}" if waits else ""
                bar = "none, the metrics' reads apart"
                yield Row(f"{label}: waits of the host{locations}", len(waits), "", "0", bar, not waits)


def joint_error(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of all tensors, concatenated."""
    return relative_error(*(torch.cat([x[name].flatten().float() for name in expected]) for x in (result, expected)))


MFU_LENGTH = 32_768
MFU_BARS = {"none": 0.50, "attention_output": 0.40, "layer": None}


def mfu_cuts(setting: Setting) -> tuple[LlamaConfig, LlamaConfig]:
    """The 8B model with few layers and with more."""
    shallow, deep = setting.size((1, 4), (1, 2))
    return replace(cut(setting), layers=shallow), replace(cut(setting), layers=deep)


def check_mfu(setting: Setting) -> Iterator[Row]:
    """Steps of an 8B model cut to two depths, at 32k tokens. Model FLOPs count causal pairs and no recomputation.

    In a model with few layers the head has a large share of the FLOPs. The two steps differ in layers alone: in their
    forward, backward, FSDP and update.
    """
    length, peak = setting.size(MFU_LENGTH, 40), setting.device.peak_flops
    shallow, deep = mfu_cuts(setting)
    if peak is None:
        yield not_run("MFU", f"the peak of {setting.device.name} is not known")
        return
    layer_count = deep.layers - shallow.layers
    layer_flops = (step_flops(deep, length) - step_flops(shallow, length)) / layer_count
    whole = setting.size(LlamaConfig.llama3_8b(), deep)
    with setting.alone() as mesh:
        for name, bar in MFU_BARS.items():
            times = [step_seconds(setting, mesh, config, length, name) for config in (shallow, deep)]
            head_share = head_flops(deep, length) / step_flops(deep, length)
            label = f"{name}, {deep.layers} layers, {head_share:.0%} of the FLOPs in the head"
            yield Row(f"{label}: {length / times[1]:,.0f} tokens/s", step_flops(deep, length) / times[1] / peak, "MFU")
            # A rehearsal's difference is noise, and may be negative.
            seconds = max(times[1] - times[0], 1e-9) / layer_count
            label, source = (
                f"{name}, a layer alone: {1e3 * seconds:.3g} ms",
                "aim; torchtitan has 35% at 8k, TRL 34% at 1M, on 8 H100",
            )
            mfu = layer_flops / seconds / peak
            yield Row(label, mfu, "MFU") if bar is None else setting.at_least(label, mfu, bar, "MFU", source)
            whole_seconds = times[0] + (whole.layers - shallow.layers) * seconds
            head_share = head_flops(whole, length) / step_flops(whole, length)
            label = f"{name}, {whole.layers} layers by these times, {head_share:.0%} of the FLOPs in the head"
            whole_mfu = step_flops(whole, length) / whole_seconds / peak
            yield Row(f"{label}: {length / whole_seconds:,.0f} tokens/s", whole_mfu, "MFU")


def step_seconds(setting: Setting, mesh: DeviceMesh, config: LlamaConfig, length: int, policy: str) -> float:
    """Device seconds of a step under a checkpointing policy."""
    training = Training.on(mesh, config, length, POLICIES[policy])
    seconds = setting.time(training.step)
    del training
    setting.device.clean()
    return seconds


OFFLOAD_LENGTH = 32_768


def check_offload(setting: Setting) -> Iterator[Row]:
    """Bandwidth of copies to the host and back, and the time that offloading adds to a step."""
    size = setting.size(2**30, 2**12)
    x = torch.empty(size, dtype=torch.bfloat16, device=setting.device.torch)
    for way, seconds in (("to the host", seconds_to_host(setting, x)), ("back", seconds_from_host(setting, x))):
        source = "PCIe 5, 64 GB/s, less its protocol"
        yield setting.at_least(f"{2 * size / 1e9:.2g} GB {way}", 2 * size / seconds / 1e9, 45, "GB/s", source)
    del x
    length, config = setting.size(OFFLOAD_LENGTH, 40), cut(setting)
    with setting.alone() as mesh:
        for name in ("layer", "attention_output"):
            times = [step_seconds(setting, mesh, config, length, policy) for policy in (name, f"{name}, offloaded")]
            label = f"{name}: step of {length:,} tokens offloaded, over one that is not"
            yield setting.at_most(label, times[1] / times[0], 1.03, "", "aim: copies are hidden")


def seconds_to_host(setting: Setting, x: torch.Tensor) -> float:
    """Seconds of a copy to the host; pinned memory is allocated by the first."""

    return setting.device.seconds(lambda: OffloadedTensors([x]).copy_to_host.finish(), 3)


def seconds_from_host(setting: Setting, x: torch.Tensor) -> float:
    """Seconds of a copy back to the device."""
    offloaded = OffloadedTensors([x])
    offloaded.copy_to_host.finish()  # otherwise the tensor is still on the device
    return setting.device.seconds(offloaded.take, 3)


COMPILE_LENGTH, COMPILE_STEPS = 8192, 2


def check_compile(setting: Setting) -> Iterator[Row]:
    """Speed-up of compiled blocks, and recompilations."""
    length, config = setting.size(COMPILE_LENGTH, 40), cut(setting)
    compiler = setting.size("inductor", "aot_eager")
    with setting.alone() as mesh:
        for name, bar in (("none", 1.05), ("attention_output", 1.0)):
            times = list[float]()
            for chosen in (None, compiler):
                training = Training.on(mesh, config, length, POLICIES[name], compiler=chosen)
                for _ in range(COMPILE_STEPS):
                    training.step()
                torch.compiler.set_stance("fail_on_recompile" if chosen else "default")
                try:
                    times.append(setting.device.seconds(training.step, setting.size(REPEATS, 1), 0))
                finally:
                    torch.compiler.set_stance("default")
                del training
                torch.compiler.reset()
                setting.device.clean()
            yield Row(f"{name}: compiled anew after two steps", "nothing", "", "nothing", "one shape, one graph", True)
            source = "torchtitan, LLaMA-3.1-8B on 8 H100: 6,667 / 5,762 = 1.16"
            yield setting.at_least(f"{name}: speed-up of {length:,} tokens", times[0] / times[1], bar, "x", source)


def step_check_flops(setting: Setting) -> float:
    """A backward on the CPU, and two on the device under each policy in each dtype."""
    config, length = setting.size((SMALL, 512), (TINY, 40))
    return (1 + 2 * len(POLICIES) * len(LIMITS)) * RECOMPUTED * step_flops(config, length)


def mfu_flops(setting: Setting) -> float:
    length = setting.size(MFU_LENGTH, 40)
    steps = setting.calls * sum(step_flops(config, length) for config in mfu_cuts(setting))
    return (1 + 2 * RECOMPUTED) * steps  # one policy recomputes nothing


def offload_flops(setting: Setting) -> float:
    return 4 * setting.calls * RECOMPUTED * step_flops(cut(setting), setting.size(OFFLOAD_LENGTH, 40))


def compile_flops(setting: Setting) -> float:
    steps = COMPILE_STEPS + setting.size(REPEATS, 1)
    return 2 * (1 + RECOMPUTED) * steps * step_flops(cut(setting), setting.size(COMPILE_LENGTH, 40))


CHECKS = (
    Check(
        "step",
        "A training step under each policy against the CPU",
        check_step,
        holds="loss and gradients; no waits",
        seconds=100,
        flops=step_check_flops,
    ),
    Check(
        "mfu",
        "MFU of layers of an 8B model, and of the model, on one rank",
        check_mfu,
        holds="layers: 50% without recomputation, 40% with",
        seconds=80,
        flops=mfu_flops,
    ),
    Check(
        "offload",
        "Checkpoints in the host's memory",
        check_offload,
        holds="45 GB/s, a step at most 3% longer",
        seconds=80,
        flops=offload_flops,
    ),
    Check(
        "compile",
        "torch.compile",
        check_compile,
        holds="not slower, and nothing compiled twice",
        seconds=100,
        flops=compile_flops,
    ),
)
