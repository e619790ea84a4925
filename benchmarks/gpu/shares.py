"""One rank of eight with free exchanges: host time, device time, and the trace compared with a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.attention import AttentionMask, Method, build_attention
from armillary.attention.internal import Kernel
from armillary.core import Trace, label
from gpu.arithmetic import DIM, FORWARD, HEADS, KEY_HEADS, attention_flops, causal_pairs
from gpu.check import Check, Row, Setting
from gpu.memory import chosen_kernel

RANKS = 8
CROSSING = 4096
"""Tokens per rank above which attention must be device-bound: the host time of 1.5 ms (Ulysses) to 6 ms (UPipe) equals
the attention time of 1.8k to 3.6k tokens."""
METHODS = {"ring": {"ring": 8}, "ulysses": {"ulysses": 8}, "usp": {"ring": 2, "ulysses": 4}, "upipe": {"ulysses": 8}}


@dataclass(eq=False)
class RecordingKernel(Kernel):
    """A kernel that records its calls, so that they can be repeated without the code around them."""

    kernel: Kernel
    calls: list[Callable[[], object]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.kernel.name

    def refuses(self, inputs: Any) -> str | None:
        return self.kernel.refuses(inputs)

    def cut(self, tile: Any) -> Any:
        return self.kernel.cut(tile)

    def forward(self, *args: Any) -> Any:
        self.calls.append(partial(self.kernel.forward, *args))
        return self.kernel.forward(*args)

    def backward(self, *args: Any) -> Any:
        self.calls.append(partial(self.kernel.backward, *args))
        return self.kernel.backward(*args)

    def repeat(self) -> None:
        for call in self.calls:
            call()


@dataclass(frozen=True)
class LayerOfRank:
    """Attention of one rank in a layer of an 8B model: 32 query heads, 8 key heads, head dim 128."""

    attend: Method
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    kernel: Kernel

    @classmethod
    def of(cls, setting: Setting, name: str, mesh: Any, tokens: int, kernel: Kernel) -> LayerOfRank:
        attend, place = build_attention(name, mesh), {"dtype": torch.bfloat16, "device": setting.device.torch}
        q, k, v, dout = (torch.randn(1, tokens, n, DIM, **place) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS))
        return cls(attend, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout), kernel)

    def forward(self) -> Tensor:
        *inputs, _ = self.tensors
        layout = self.attend.layout(inputs[0].shape[1] * RANKS)
        return self.attend(*inputs, mask=AttentionMask(), layout=layout, kernel=self.kernel)

    def run(self) -> None:
        *inputs, dout = self.tensors
        torch.autograd.grad(self.forward(), inputs, dout)


def share_lengths(setting: Setting) -> list[int]:
    """Tokens of a rank. Four times as many would take 16 times as long, and the device is slower long before that."""
    return setting.size([2**n * 1024 for n in range(5)], [8, 16])


def rank_pairs(tokens: int) -> float:
    """Visible pairs of one of `RANKS` ranks with `tokens` tokens each, or its share of heads over all pairs."""
    return causal_pairs(RANKS * tokens) / RANKS


def share_flops(setting: Setting) -> float:
    """Host and device times by length, and for the last length all of it, again, and its kernels alone."""
    lengths, calls = share_lengths(setting), setting.calls
    passes = sum(2 * calls * rank_pairs(tokens) for tokens in lengths) + (2 * calls + 1) * rank_pairs(lengths[-1])
    return len(METHODS) * attention_flops(passes)


def trace_flops(setting: Setting) -> float:
    return 2 * 2 * attention_flops(rank_pairs(setting.size(TRACE_TOKENS, 64)), FORWARD)


TRACE_TOKENS = 32_768


def check_share(setting: Setting) -> Iterator[Row]:
    """Host and device time by length, the length from which the device is slower, and the kernels' part of the time."""
    kernel, lengths = chosen_kernel(setting, DIM), share_lengths(setting)
    for name, axes in METHODS.items():
        crossing = None
        with setting.one_of(**axes) as mesh:
            for tokens in lengths:
                layer = LayerOfRank.of(setting, name, mesh, tokens, kernel)
                host, device = 1e3 * setting.host_time(layer.run), 1e3 * setting.time(layer.run)
                crossing = crossing or (tokens if device > 1.05 * host else None)
                yield Row(f"{name}, {tokens:,} tokens a rank: device; host {host:.3g}", device, "ms")
            title, source = f"{name}: the device is slower from", "host.py's microseconds, and a kernel at 500 TFLOP/s"
            if crossing is None:
                yield Row(title, "none of these", "", f"at most {CROSSING}", source, None if setting.fake else False)
            else:
                yield setting.at_most(title, crossing, CROSSING, "tokens a rank", source)
            yield kernel_row(setting, name, mesh, lengths[-1], kernel)


def kernel_row(setting: Setting, name: str, mesh: Any, tokens: int, kernel: Kernel) -> Row:
    """The time of the kernel calls alone, relative to all of forward and backward."""
    recorded = RecordingKernel(kernel)
    layer = LayerOfRank.of(setting, name, mesh, tokens, kernel)
    total_seconds = setting.time(layer.run)
    LayerOfRank(layer.attend, layer.tensors, recorded).run()
    kernel_seconds = setting.time(recorded.repeat)
    title = f"{name}, {tokens:,} tokens a rank: {len(recorded.calls)} kernel calls alone, over all of it"
    return setting.at_least(title, kernel_seconds / total_seconds, 0.95, "", "aim: cells lose 5% to merges and copies")


def check_trace(setting: Setting) -> Iterator[Row]:
    """A span of `armillary.core.Trace` compared with torch's profiler for the same label."""
    kernel, tokens = chosen_kernel(setting, DIM), setting.size(TRACE_TOKENS, 64)
    for name in ("ring", "ulysses"):
        with setting.one_of(**METHODS[name]) as mesh:
            layer = LayerOfRank.of(setting, name, mesh, tokens, kernel)
            trace = Trace(setting.device.type)
            layer.forward()
            profiled = setting.device.labelled(partial(traced, layer, trace), "share")
            spans = [event for event in trace.events() if event.get("name") == "share"]
            seconds = sum(event["dur"] for event in spans) / 1e6
            cells = sum(event["dur"] for event in trace.events() if event.get("cat") == "compute") / 1e6
            title = (
                f"{name}, {tokens:,} tokens a rank: {cells / seconds:.1%} of it in cells; trace over profile, less 1"
            )
            yield setting.at_most(title, abs(seconds / profiled - 1), 0.02, "", "both are CUDA's clocks")


@torch.no_grad()
def traced(layer: LayerOfRank, trace: Trace) -> None:
    """Traces forward only: a profile does not assign autograd's thread to this thread's label."""
    with trace, label("share"):
        layer.forward()


CHECKS = (
    Check(
        "share",
        "One rank's share of eight: host, device and the bare kernel",
        check_share,
        holds="95% of it in kernels",
        seconds=90,
        flops=share_flops,
    ),
    Check("trace", "The trace against torch's profiler", check_trace, "within 2%", 25, trace_flops),
)
