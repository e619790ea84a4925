"""Clocks of traces: they record instants on the host or the device without making either wait."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

import torch

Instant = TypeVar("Instant")


class Clock(Protocol[Instant]):
    """Records instants now and converts them to times later."""

    def now(self) -> Instant: ...

    def microseconds(self, instant: Instant) -> float:
        """Returns the time of an instant since the clock was made."""
        ...


class HostClock:
    """Instants as nanoseconds of the host's performance counter."""

    def __init__(self) -> None:
        self.origin = self.now()

    def now(self) -> int:
        return time.perf_counter_ns()

    def microseconds(self, instant: int) -> float:
        return (instant - self.origin) / 1000


class CudaClock:
    """Instants of the current stream, as CUDA events. The host waits only when a time is read."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.origin = self.now()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, instant: torch.cuda.Event) -> float:
        instant.synchronize()
        return self.origin.elapsed_time(instant) * 1000
