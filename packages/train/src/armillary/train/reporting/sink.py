"""The interface of sinks, and the thread that isolates training from them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from armillary.train.reporting.metrics import StepMetrics


class Sink(Protocol):
    """Receives what happens in a run, in the order of steps; may raise any error."""

    def resumed(self, step: int) -> None:
        """Called first: training continues after `step`, 0 for a new run. Records of later steps are void."""
        ...

    def step(self, metrics: StepMetrics) -> None: ...

    def validated(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """Something else happened: saved, skipped, stopped, finished, failed."""
        ...

    def close(self) -> None: ...


class Guarded:
    """A sink in a thread of its own, so that neither its errors nor its blocking reach training.

    A full or hung disk, a lost network and a stopped terminal cost reports, nothing else. The first error is printed;
    the sink is tried again with the next report.

    Args:
        complain: called with a line about the first error; in any thread.
        room: length of the queue; further reports are dropped.
    """

    def __init__(self, sink: Sink, complain: Callable[[str], None], room: int = 10_000) -> None:
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
