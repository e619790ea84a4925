"""Signals that end a run after its current step: all ranks save and end, even if only one of them was signalled."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from armillary.data.console import report_failure

# Seconds after a signal from which another one counts as a second request.
#
# A scheduler may signal torchrun and its ranks, and torchrun forwards the signal at once: that is one request.
REPEAT = 3.0


class StopSignal:
    """Context manager that handles SIGTERM and SIGUSR1: training ends on all ranks after the current step.

    A second signal, `REPEAT` seconds after the first or later, ends the process at once, without saving.

    Outside of the main thread, the only one in which Python handles signals, a block does nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received = False
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._wakeup: int | None = None  # file descriptor to which Python writes the numbers of signals
        self._previous_wakeup = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A thread waits for the second signal. Python runs `_receive` only once the main thread is back from a call
            # into C++, which may wait for a collective or for the GPU. But it writes the number of a signal to the file
            # descriptor as soon as the signal arrives.
            reader, self._wakeup = os.pipe()
            os.set_blocking(self._wakeup, False)
            self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            threading.Thread(target=self._end_at_second_signal, args=(reader,), name="signals", daemon=True).start()
            self._previous_handlers = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._wakeup is not None:
            for number, handler in self._previous_handlers.items():
                # The handler is None if it was not installed from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._wakeup)  # ends the thread
            self._wakeup = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def _end_at_second_signal(self, reader: int) -> None:
        first: float | None = None
        with suppress(OSError), os.fdopen(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):  # empty when `__exit__` has closed the other end
                if number[0] not in self.SIGNALS:
                    continue
                if first is None:
                    first = time.monotonic()
                elif time.monotonic() - first >= REPEAT:
                    name = signal.Signals(number[0]).name
                    report_failure("armillary-train", f"ended by {name}, the second signal, without saving")
                    os._exit(128 + number[0])

    def is_requested(self, device: torch.device) -> bool:
        """Returns True on every rank if any rank has received a signal. Collective."""
        # A signal may reach ranks during different steps. The all-reduce makes them stop after the same one.
        count = torch.tensor(float(self.received), device=device)
        dist.all_reduce(count)
        return count.item() > 0
