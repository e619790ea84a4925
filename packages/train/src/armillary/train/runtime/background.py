"""Threads beside training: one piece of work with its error, and reports that must not disturb it."""

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
    """A background thread. An error is kept until `result` is called.

    A daemon: a process that ends because of an error does not wait for ranks that may be gone.
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

    def result(self) -> None:
        """Raises what the work has raised."""
        if self.error is not None:
            raise self.error


class Guarded(Generic[Closed]):
    """Something that is reported to in a thread of its own, so that neither its errors nor its blocking reach training.

    A full or hung disk, a lost network and a stopped terminal cost reports, nothing else. The first error is told;
    the sink is tried again with the next report.

    Args:
        sink: is called in the thread alone.
        complain: called with a line about the first error; in any thread.
        room: length of the queue; further reports are dropped.
    """

    def __init__(self, sink: Closed, complain: Callable[[str], None], room: int = 10_000) -> None:
        self.sink, self.name, self._complain, self._room = sink, type(sink).__name__, complain, room
        self._complained = False
        # A SimpleQueue may be put to from a signal handler too.
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], object]) -> None:
        """Queues `action`, to be called in the sink's thread. Never blocks."""
        if self._waiting.qsize() < self._room:
            self._waiting.put(action)
        else:
            self._fail(f"has {self._room} reports waiting; more are lost")

    def flush(self, seconds: float) -> bool:
        """Waits until all queued actions are done, for `seconds` at most; whether they are."""
        done = threading.Event()
        self._waiting.put(done.set)
        return done.wait(seconds)

    def close(self, seconds: float) -> None:
        """Ends the sink, and waits for that for `seconds` at most."""
        self._waiting.put(self.sink.close)
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"is still busy after {seconds:.0f} s; what it has not written is lost")

    def _work(self) -> None:
        while (action := self._waiting.get()) is not None:
            try:
                action()
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}; training continues")

    def _fail(self, said: str) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"{self.name} {said}")
