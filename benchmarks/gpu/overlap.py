"""Overlap of exchanges with attention, of communicators, and of streams; and memory during exchanges."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention import AttentionMask, Ring
from armillary.attention.internal import MULTIPROCESSORS, FlashAttn3, Kernel
from armillary.attention.kernels.choice import SM_MARGIN
from armillary.attention.rings.rotate import Rotation
from armillary.attention.rings.topology import RingTopology
from armillary.attention.tiling.grid import grid_of
from armillary.core import Axis, Exchange
from armillary.core.internal import compat
from gpu.arithmetic import DIM, FORWARD, HEADS, KEY_HEADS, attention_flops, causal_pairs
from gpu.check import REPEATS, WARMUP, Check, Row, Setting
from gpu.device import CpuDevice, CudaDevice, Device
from gpu.groups import mesh_of_all
from gpu.kernels import usable
from gpu.launch import Place, joined, on_ranks, worst


def device_at(place: Place) -> Device:
    return CudaDevice() if place.device == "cuda" else CpuDevice()


def attention_tensors(device: Device, tokens: int) -> list[Tensor]:
    """q, k, v and dout of one rank in a layer of an 8B model."""
    place = {"dtype": torch.bfloat16, "device": device.torch}
    return [torch.randn(1, tokens, heads, DIM, **place) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


# -- overlap of exchanges with attention -------------------------------------------------------------------------------


class RingTimes(NamedTuple):
    """Seconds of a ring's forward: complete, without exchanges, and of its exchanges without attention."""

    complete: float
    without_exchanges: float
    exchange: float

    @property
    def hidden(self) -> float:
        """The fraction of the exchanges hidden by attention."""
        return 1 - (self.complete - self.without_exchanges) / self.exchange


OVERLAP_TOKENS, RING_MEMORY_TOKENS, RING_MEMORY_LAYERS = 16_384, 8192, 8


def check_overlap(setting: Setting) -> Iterator[Row]:
    """Hidden fraction by kernel, and by the multiprocessors that FlashAttention-3 leaves to NCCL."""
    tokens = setting.size(OVERLAP_TOKENS, 16)
    kernels = [each for each in usable(setting, torch.bfloat16, DIM, AttentionMask()) if each.name != "dense"][:3]
    margins = [replaced for each in kernels for replaced in with_margins(each)]
    times = dict[str, RingTimes]()
    for name, kernel in margins:
        times[name] = RingTimes(*worst(on_ranks(setting, ring_times, kernel, tokens)))
        label = f"{name}, {tokens:,} tokens a rank: share of the exchanges that forward hides"
        if name == f"{FlashAttn3.name}, margin 0":
            yield setting.at_most(label, times[name].hidden, 0.3, "", "the planner assumes none")
        else:
            yield setting.at_least(label, times[name].hidden, 0.7, "", "the planner assumes 90% to 100%")
    without, with_margin = (times.get(f"{FlashAttn3.name}, margin {margin}") for margin in (0, SM_MARGIN))
    if without and with_margin:
        bar = 1.05 * MULTIPROCESSORS / (MULTIPROCESSORS - SM_MARGIN)
        label = f"{FlashAttn3.name}: forward with margin {SM_MARGIN} over margin 0, nothing sent"
        yield setting.at_most(
            label, with_margin.without_exchanges / without.without_exchanges, bar, "", "by multiprocessors"
        )
        ratio = with_margin.complete / without.complete
        yield setting.at_most(f"{FlashAttn3.name}: the same with exchanges", ratio, 1.0, "", "the default margin")


def with_margins(kernel: Kernel) -> Iterator[tuple[str, Kernel]]:
    """Yields the kernel by name, and FlashAttention-3 with and without a margin."""
    if isinstance(kernel, FlashAttn3):
        for margin in (0, SM_MARGIN):
            yield f"{kernel.name}, margin {margin}", FlashAttn3(sm_margin=margin)
    else:
        yield kernel.name, kernel


@torch.no_grad()
def ring_times(place: Place, kernel: Kernel, tokens: int) -> list[float]:
    """The fields of `RingTimes` on this rank."""
    device = device_at(place)
    with joined(place):
        method = Ring(mesh_of_all(place)["ring"])
        q, k, v, _ = attention_tensors(device, tokens)
        layout, mask = method.layout(tokens * method.shards), AttentionMask()
        attend = partial(method, q, k, v, mask=mask, layout=layout, kernel=kernel)
        ring = RingTopology.of_all(method.axis.size, "keys")
        rotation = Rotation.of(method.axis, method.return_axis, ring, grid_of(layout, layout, mask))

        def exchange() -> None:
            for _ in rotation.rotate(k, v):
                pass

        complete = device.seconds(attend)
        with nothing_sent():
            without_exchanges = device.seconds(attend)
        dist.barrier()
        return [complete, without_exchanges, device.seconds(exchange)]


@contextmanager
def nothing_sent() -> Generator[None]:
    """Makes ring exchanges complete at once, without writing to their buffers."""

    def started(axis: Axis, send: dict, receive: dict) -> Exchange:
        return Exchange(axis, send, receive, ())

    with patch("armillary.attention.rings.rotate.start_exchange", started):
        yield


# -- overlap of communicators ------------------------------------------------------------------------------------------


def check_queue(setting: Setting) -> Iterator[Row]:
    """Time of a head axis's all-to-all over all ranks that starts after an all-gather of FSDP."""
    shared, separate = (max(on_ranks(setting, seconds_behind_fsdp, separate)) for separate in (False, True))
    label = f"all-to-all on a communicator of its own ({1e3 * separate:.3g} ms) over FSDP's ({1e3 * shared:.3g} ms)"
    yield setting.at_most(label, separate / shared, 0.7, "", "streams of high priority")


def seconds_behind_fsdp(place: Place, separate: bool) -> float:
    """Seconds from the start of both collectives to the end of the all-to-all."""
    device = device_at(place)
    with joined(place):
        ranks = dist.get_world_size()
        mesh = mesh_of_all(place, ("ulysses",) if separate else (), ulysses=ranks)
        group, size = Axis.of(mesh["ulysses"]).group, 2**27 if place.device == "cuda" else 2**10
        options = {"dtype": torch.bfloat16, "device": device.torch}
        parameters, gathered = torch.zeros(size, **options), torch.zeros(size * ranks, **options)
        send_buffer, receive_buffer = torch.zeros(size // 4, **options), torch.zeros(size // 4, **options)
        gathering = list[dist.Work]()

        def both_collectives() -> None:
            gathering.append(compat.all_gather_single(gathered, parameters, dist.group.WORLD))
            work = dist.all_to_all_single(receive_buffer, send_buffer, group=group, async_op=True)
            assert work is not None
            work.wait()

        seconds = list[float]()
        for _ in range(5):
            dist.barrier()
            seconds += device.times(both_collectives, 1)
            gathering.pop().wait()
        return median(seconds[1:])


# -- memory during exchanges -------------------------------------------------------------------------------------------


def check_ring_memory(setting: Setting) -> Iterator[Row]:
    """Memory reserved from the driver by layers of ring attention, enqueued at once and one by one."""
    tokens, layers = setting.size((RING_MEMORY_TOKENS, RING_MEMORY_LAYERS), (16, 2))
    for way in ("forward", "forward and backward"):
        ahead, waiting = (
            max(on_ranks(setting, reserved_by_layers, tokens, layers, way, waits)) for waits in (False, True)
        )
        label = f"{layers} layers, {way}, {tokens:,} tokens a rank: reserved where the host runs ahead, over one by one"
        yield setting.at_most(label, ahead / waiting, 1.1, "", "two receive buffers a ring")


def reserved_by_layers(place: Place, tokens: int, layers: int, way: str, waits: bool) -> int:
    device = device_at(place)
    with joined(place):
        method = Ring(mesh_of_all(place)["ring"])
        *inputs, dout = attention_tensors(device, tokens)
        layout = method.layout(tokens * method.shards)

        def work() -> None:
            for _ in range(layers):
                q, k, v = (x.detach().requires_grad_("backward" in way) for x in inputs)
                out = method(q, k, v, mask=AttentionMask(), layout=layout)
                if "backward" in way:
                    torch.autograd.grad(out, (q, k, v), dout)
                if waits:
                    device.synchronize()

        return device.peak(work).reserved


# -- streams -----------------------------------------------------------------------------------------------------------

STREAMS = 12
"""About the number of streams of a run: compute, FSDP, communicators and copies."""
AT_ONCE = f"""
import torch
streams, cycles = [torch.cuda.Stream() for _ in range({STREAMS})], 50_000_000
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
def milliseconds(streams):
    torch.cuda.synchronize()
    start.record()
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
milliseconds(streams)
print(milliseconds(streams) / milliseconds(streams[:1]))
"""


def check_streams(setting: Setting) -> Iterator[Row]:
    """Time of kernels on a dozen streams over that of one kernel: above 1 if streams wait for each other."""
    for queues in (8, 32):
        over = 1.0 if setting.fake else at_once(queues)
        label = f"{STREAMS} streams on {queues} work queues: time over that of one"
        if queues == 8:
            yield Row(label, over, source="CUDA's default")
        else:
            yield setting.at_most(label, over, 1.3, "", "--cuda.connections")


def at_once(queues: int) -> float:
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    command: list[str] = [sys.executable, "-c", AT_ONCE]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def ring_pairs(setting: Setting, tokens: int) -> float:
    """Visible pairs of a rank with `tokens` tokens."""
    return causal_pairs(setting.ranks * tokens) / setting.ranks


def overlap_flops(setting: Setting) -> float:
    """Forward with exchanges and without, of at most three kernels, and of one of them with a margin."""
    pairs = ring_pairs(setting, setting.size(OVERLAP_TOKENS, 16))
    return 4 * 2 * (WARMUP + REPEATS) * attention_flops(pairs, FORWARD)


def ring_memory_flops(setting: Setting) -> float:
    """Forward, and forward and backward, each enqueued at once and one by one."""
    tokens, layers = setting.size((RING_MEMORY_TOKENS, RING_MEMORY_LAYERS), (16, 2))
    pairs = 2 * layers * ring_pairs(setting, tokens)
    return attention_flops(pairs, FORWARD) + attention_flops(pairs)


CHECKS = (
    Check(
        "overlap",
        "Exchanges of a ring beside attention's forward",
        check_overlap,
        holds="hidden, but not beside FA3 without a margin",
        seconds=60,
        flops=overlap_flops,
        gpus=2,
        nccl=True,
    ),
    Check(
        "queue",
        "An all-to-all behind FSDP's all-gather",
        check_queue,
        holds="does not wait for it",
        seconds=30,
        gpus=2,
        nccl=True,
    ),
    Check(
        "ring-memory",
        "Memory of rings whose host runs ahead",
        check_ring_memory,
        holds="at most 10% more than one by one",
        seconds=40,
        flops=ring_memory_flops,
        gpus=2,
        nccl=True,
    ),
    Check("streams", "Streams on few and on many work queues", check_streams, "as long as one, on 32 queues", 30),
)
