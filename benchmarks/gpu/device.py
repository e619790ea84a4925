"""What is asked of the device itself: time, memory, synchronisation, a profile. A GPU, or the CPU in its place."""

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

from armillary.train.runtime.allocator import set_allocator
from armillary.train.runtime.peak import peak_flops

Work = Callable[[], object]
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Peak(NamedTuple):
    """The most bytes held at once above what was held before: of tensors, and taken from the driver for them."""

    allocated: int
    reserved: int


class Device(ABC):
    """One device."""

    type: str
    name: str
    activity: ProfilerActivity
    profiled: DeviceType
    """Whose events in a profile say how long something took here."""
    capability: tuple[int, int]
    peak_flops: float | None
    """Dense bfloat16 FLOP/s, where known."""

    @property
    def torch(self) -> torch.device:
        return torch.device(self.type)

    @property
    @abstractmethod
    def memory(self) -> int:
        """Bytes."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def times(self, work: Work, repeats: int) -> list[float]:
        """Seconds that the device is busy with each call."""

    @abstractmethod
    def peak(self, work: Work) -> Peak:
        """What one call takes."""

    @abstractmethod
    def syncs(self, work: Work) -> list[str]:
        """Where in a call the host waits for the device."""

    def seconds(self, work: Work, repeats: int = 5, warmup: int = 2) -> float:
        """Of a call, on the device: the median."""
        for _ in range(warmup):
            work()
        return median(self.times(work, repeats))

    def host_seconds(self, work: Work, repeats: int = 5, warmup: int = 2) -> float:
        """Of a call, on the host, which finds an idle device and does not wait for it: the median."""
        seconds = list[float]()
        for _ in range(warmup + repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        self.synchronize()
        return median(seconds[warmup:])

    def labelled(self, work: Work, name: str) -> float:
        """Seconds of what has this label in a profile of one call."""
        with profile(activities={ProfilerActivity.CPU, self.activity}) as profiler:
            work()
            self.synchronize()
        events: Iterable[Any] = profiler.events() or ()
        of_name = [each for each in events if each.name == name and each.device_type == self.profiled]
        return sum(each.time_range.elapsed_us() for each in of_name) / 1e6

    def clean(self) -> None:
        """Gives back what nothing holds any more."""
        gc.collect()


class CudaDevice(Device):
    """The current GPU."""

    type, activity, profiled = "cuda", ProfilerActivity.CUDA, DeviceType.CUDA

    def __init__(self) -> None:
        if not any("expandable" in os.environ.get(name, "") for name in ALLOCATOR):
            set_allocator("expandable_segments:True")  # as the trainer has it
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
    """In its place where there is none: the same questions, answered for the CPU."""

    type, activity, profiled = "cpu", ProfilerActivity.CPU, DeviceType.CPU
    name, capability = f"no GPU: {platform.machine()}", (9, 0)
    peak_flops = 1e12
    """Made up, so that shares of it can be shown."""

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
    """Takes down the ops that make numbers of tensors: on a GPU the host would wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))
