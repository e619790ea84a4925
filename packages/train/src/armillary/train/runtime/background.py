"""Threads beside training: one runs a task and keeps its error, one writes reports without disturbing training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from threading import Thread
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


Closed = TypeVar("Closed", bound=Closable)


class Background(Thread):
    """A thread that runs `work`, started by the constructor. `raise_error` raises the error of `work`.

    The thread is a daemon: when the main thread ends with an error, the process does not wait for `work`, which may be
    waiting for missing ranks.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def raise_error(self) -> None:
        """Raises the error of `work`, if there was one. Call it when the thread has ended."""
        if self.error is not None:
            raise self.error


class GuardedSink(Generic[Closed]):
    """A sink of reports with its own thread, so that its errors and its blocking do not affect training.

    A full disk, a lost network or a stopped terminal loses only reports. Only the first error is printed; the sink is
    called again for the next report.

    Args:
        sink: called only in the thread.
        complain: called with a line about the first error; in any thread.
        capacity: length of the queue; reports beyond it are dropped.
    """

    def __init__(self, sink: Closed, complain: Callable[[str], None], capacity: int = 10_000) -> None:
        self.sink, self.name, self._complain, self._capacity = sink, type(sink).__name__, complain, capacity
        self._complained = False
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], object]) -> None:
        """Queues `action` for the sink's thread. Never blocks."""
        if self._queue.qsize() < self._capacity:
            self._queue.put(action)
        else:
            self._fail(f"has {self._capacity} reports waiting; more are lost")

    def flush(self, seconds: float) -> bool:
        """Waits for all queued actions, at most `seconds`; returns False if some are not done."""
        event = threading.Event()
        self._queue.put(event.set)
        return event.wait(seconds)

    def close(self, seconds: float) -> None:
        """Closes the sink and waits for its thread, at most `seconds`."""
        self._queue.put(self.sink.close)
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"is still busy after {seconds:.0f} s; unwritten reports are lost")

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            try:
                action()
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}; training continues")

    def _fail(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"{self.name} {reason}")
