"""Signals that end training early."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist


class StopSignal:
    """Context manager that handles SIGTERM and SIGUSR1: training ends on all ranks after the current step.

    The handler only sets `received`, so that further signals do not interrupt the last save. Blocks of one object may
    be nested: a signal that arrived in the outer block counts in the inner one. Outside of the main thread, the only
    one in which Python handles signals, a block does nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received = False
        self._previous_handlers: list[dict[signal.Signals, Any]] = []  # by signal, for each block that was entered

    def __enter__(self) -> Self:
        previous_handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                previous_handlers[number] = signal.signal(number, self._receive)
        self._previous_handlers.append(previous_handlers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.pop().items():
            # The handler is None if it was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def is_requested(self, device: torch.device) -> bool:
        """Returns True on every rank if any rank has received a signal. Collective."""
        # A signal may reach ranks during different steps. The all-reduce makes them stop after the same one.
        count = torch.tensor(float(self.received), device=device)
        dist.all_reduce(count)
        return count.item() > 0
