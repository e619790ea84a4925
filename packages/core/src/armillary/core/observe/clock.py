"""Clocks of traces. Recording an instant makes neither the host nor the device wait."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

import torch

Instant = TypeVar("Instant")


class Clock(Protocol[Instant]):
    """Records instants, and converts them to times later."""

    def now(self) -> Instant: ...

    def microseconds(self, instant: Instant) -> float:
        """Returns the time from the creation of the clock to an instant."""
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
    """Instants are CUDA events on the current stream. The host waits for the device at the start and to read times."""

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
