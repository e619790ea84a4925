"""Measurements of a device: time, memory, synchronization and profiles; of a GPU, or the CPU as a stand-in."""

from __future__ import annotations

import gc
import os
import platform
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.train.device import peak_flops, set_allocator

Work = Callable[[], object]
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Peak(NamedTuple):
    """Peak bytes above the bytes before: of tensors, and reserved from the driver."""

    allocated: int
    reserved: int


class Device(ABC):
    """The interface of a device."""

    type: str
    name: str
    activity: ProfilerActivity
    profiled: DeviceType
    """Device type whose events in a profile are counted."""
    capability: tuple[int, int]
    peak_flops: float | None
    """Dense bfloat16 FLOP/s, if known."""

    @property
    def torch(self) -> torch.device:
        return torch.device(self.type)

    @property
    @abstractmethod
    def memory(self) -> int:
        """Memory of the device in bytes."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def times(self, work: Work, repeats: int) -> list[float]:
        """Device seconds of each call."""

    @abstractmethod
    def peak(self, work: Work) -> Peak:
        """Peak memory of one call."""

    @abstractmethod
    def syncs(self, work: Work) -> list[str]:
        """Source lines of a call at which the host waits for the device."""

    def seconds(self, work: Work, repeats: int = 5, warmup: int = 2) -> float:
        """Median device seconds of a call."""
        for _ in range(warmup):
            work()
        return median(self.times(work, repeats))

    def host_seconds(self, work: Work, repeats: int = 5, warmup: int = 2) -> float:
        """Median host seconds of a call, which starts on an idle device and does not wait for it."""
        seconds = list[float]()
        for _ in range(warmup + repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        self.synchronize()
        return median(seconds[warmup:])

    def labelled(self, work: Work, name: str) -> float:
        """Seconds under the label `name` in a profile of one call."""
        with profile(activities={ProfilerActivity.CPU, self.activity}) as profiler:
            work()
            self.synchronize()
        events: Iterable[Any] = profiler.events() or ()
        of_name = [each for each in events if each.name == name and each.device_type == self.profiled]
        return sum(each.time_range.elapsed_us() for each in of_name) / 1e6

    def clean(self) -> None:
        """Frees cached memory without references."""
        gc.collect()


class CudaDevice(Device):
    """The current GPU."""

    type, activity, profiled = "cuda", ProfilerActivity.CUDA, DeviceType.CUDA

    def __init__(self) -> None:
        if not any("expandable" in os.environ.get(name, "") for name in ALLOCATOR):
            set_allocator("expandable_segments:True")  # the trainer's setting
        self.name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        self.capability, self.peak_flops = torch.cuda.get_device_capability(), peak_flops(self.torch)

    @property
    def memory(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def times(self, work: Work, repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def peak(self, work: Work) -> Peak:
        self.clean()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        work()
        torch.cuda.synchronize()
        return Peak(torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1])

    def syncs(self, work: Work) -> list[str]:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]

    def clean(self) -> None:
        super().clean()
        torch.cuda.empty_cache()


class CpuDevice(Device):
    """The CPU as a stand-in for a GPU."""

    type, activity, profiled = "cpu", ProfilerActivity.CPU, DeviceType.CPU
    name, capability = f"no GPU: {platform.machine()}", (9, 0)
    peak_flops = 1e12
    """An arbitrary value, so that fractions of the peak can be printed."""

    @property
    def memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def synchronize(self) -> None:
        return

    def times(self, work: Work, repeats: int) -> list[float]:
        starts = [time.perf_counter()]
        for _ in range(repeats):
            work()
            starts.append(time.perf_counter())
        return [end - start for start, end in pairwise(starts)]

    def peak(self, work: Work) -> Peak:
        from armillary.plan.memory import measured_peak

        result = measured_peak(work)
        return Peak(result, result)

    def syncs(self, work: Work) -> list[str]:
        with Reads() as reads:
            work()
        return reads.found


class Reads(TorchDispatchMode):
    """Records ops that read values of tensors, for which the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))
