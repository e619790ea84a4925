"""Signals that end training before the last step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist


class StopSignal:
    """Context manager that handles SIGTERM and SIGUSR1: training ends on all ranks after the current step.

    One object's blocks may be nested: a signal that arrived in the outer block counts in the inner one. Further signals
    have no effect, so that the last checkpoint is written completely. Python handles signals in its main thread only;
    a block in another thread does nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received = False
        self._previous: list[dict[signal.Signals, Any]] = []

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        self._previous.append({number: signal.signal(number, self._receive) for number in self.SIGNALS if is_main})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.pop().items():
            # The handler is None if it was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def is_requested(self, device: torch.device) -> bool:
        """Returns True on every rank if any rank has received a signal. Collective."""
        # A signal may reach ranks during different steps. After the all-reduce all of them stop after the same step.
        count = torch.tensor(float(self.received), device=device)
        dist.all_reduce(count)
        return count.item() > 0
