"""Taking down when something happens, on the host or on the device, without making anybody wait."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

import torch

Instant = TypeVar("Instant")


class Clock(Protocol[Instant]):
    """Takes down instants now, and says later when they were."""

    def now(self) -> Instant: ...

    def microseconds(self, instant: Instant) -> float:
        """Since the clock was made."""
        ...


class HostClock:
    """When the host does things."""

    def __init__(self) -> None:
        self.origin = self.now()

    def now(self) -> int:
        return time.perf_counter_ns()

    def microseconds(self, instant: int) -> float:
        return (instant - self.origin) / 1000


class CudaClock:
    """When the current stream gets there. The host waits for nothing before the times are asked for."""

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
