"""A training step on one rank: results under every policy, throughput, offloading and compilation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from armillary.core.testing import relative_error
from armillary.models import Checkpointing
from armillary.models.activation_checkpoint.offload import OffloadedTensors
from gpu.check import Check, Row, Setting, correct
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


def check_mfu(setting: Setting) -> Iterator[Row]:
    """A shortened 8B model at 32k tokens. Model FLOPs count causal pairs and no recomputation."""
    length, config = setting.size(32_768, 40), cut(setting, 4)
    bars = {"none": 0.50, "attention_output": 0.40, "layer": None}
    flops = length * config.flops_per_token(length)
    with setting.alone() as mesh:
        for name, bar in bars.items():
            training = Training.on(mesh, config, length, POLICIES[name])
            seconds = setting.device.seconds(training.step, setting.size(5, 1), setting.size(2, 0))
            label = f"{config.layers} layers, {length:,} tokens, {name}: {length / seconds:,.0f} tokens/s"
            peak, source = setting.device.peak_flops, "aim; torchtitan has 35% at 8k, TRL 34% at 1M, on 8 H100"
            if bar is None or peak is None:
                yield Row(label, flops / seconds / 1e12, "TFLOP/s", source="" if peak else "peak of this GPU not known")
            else:
                yield setting.at_least(label, flops / seconds / peak, bar, "MFU", source)
            del training
            setting.device.clean()


def check_offload(setting: Setting) -> Iterator[Row]:
    """Bandwidth of copies to the host and back, and the time that offloading adds to a step."""
    size = setting.size(2**30, 2**12)
    x = torch.empty(size, dtype=torch.bfloat16, device=setting.device.torch)
    for way, seconds in (("to the host", seconds_to_host(setting, x)), ("back", seconds_from_host(setting, x))):
        source = "PCIe 5, 64 GB/s, less its protocol"
        yield setting.at_least(f"{2 * size / 1e9:.2g} GB {way}", 2 * size / seconds / 1e9, 45, "GB/s", source)
    del x
    length, config = setting.size(32_768, 40), cut(setting, 4)
    with setting.alone() as mesh:
        for name in ("layer", "attention_output"):
            times = list[float]()
            for policy in (name, f"{name}, offloaded"):
                training = Training.on(mesh, config, length, POLICIES[policy])
                times.append(setting.device.seconds(training.step, setting.size(5, 1), setting.size(2, 0)))
                del training
                setting.device.clean()
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


def check_compile(setting: Setting) -> Iterator[Row]:
    """Speed-up of compiled blocks, and recompilations."""
    length, config = setting.size(8192, 40), cut(setting, 4)
    compiler = setting.size("inductor", "aot_eager")
    with setting.alone() as mesh:
        for name, bar in (("none", 1.05), ("attention_output", 1.0)):
            times = list[float]()
            for chosen in (None, compiler):
                training = Training.on(mesh, config, length, POLICIES[name], compiler=chosen)
                for _ in range(2):
                    training.step()
                torch.compiler.set_stance("fail_on_recompile" if chosen else "default")
                try:
                    times.append(setting.device.seconds(training.step, setting.size(5, 1), 0))
                finally:
                    torch.compiler.set_stance("default")
                del training
                torch.compiler.reset()
                setting.device.clean()
            yield Row(f"{name}: compiled anew after two steps", "nothing", "", "nothing", "one shape, one graph", True)
            source = "torchtitan, LLaMA-3.1-8B on 8 H100: 6,667 / 5,762 = 1.16"
            yield setting.at_least(f"{name}: speed-up of {length:,} tokens", times[0] / times[1], bar, "x", source)


CHECKS = (
    Check("step", "A training step under each policy against the CPU", check_step, "loss and gradients; no waits", 100),
    Check("mfu", "MFU of an 8B cut on one rank", check_mfu, "50% without recomputation, 40% with", 80),
    Check("offload", "Checkpoints in the host's memory", check_offload, "45 GB/s, a step at most 3% longer", 80),
    Check("compile", "torch.compile", check_compile, "not slower, and nothing compiled twice", 100),
)
