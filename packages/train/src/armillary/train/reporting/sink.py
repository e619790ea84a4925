"""Where reports go, and how it is kept from touching training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from armillary.train.reporting.metrics import StepMetrics


class Sink(Protocol):
    """Takes what happens in a run, in the order of its steps, and may raise whatever it likes."""

    def resumed(self, step: int) -> None:
        """Called first: training goes on after `step`, 0 for a fresh run. What was told of later steps is void."""
        ...

    def step(self, metrics: StepMetrics) -> None: ...

    def validated(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """Something else happened: saved, skipped, stopped, finished, failed."""
        ...

    def close(self) -> None: ...


class Guarded:
    """A sink in a thread of its own, so that neither its errors nor its waits reach training.

    A disk that is full or hangs, a network that is gone and a terminal that is stopped cost reports, nothing else.
    What goes wrong is said once; the sink is tried again with the next report.

    Args:
        complain: is told in a sentence what goes wrong; called in any thread.
        room: reports that may wait for a sink that is slow; more are dropped.
    """

    def __init__(self, sink: Sink, complain: Callable[[str], None], room: int = 10_000) -> None:
        self.sink, self.name, self._complain, self._room = sink, type(sink).__name__, complain, room
        self._complained = False
        # A SimpleQueue may be put to from a signal handler too.
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def tell(self, action: Callable[[], object]) -> None:
        """Has `action`, which is to report something to the sink, called in the sink's thread. Never waits."""
        if self._waiting.qsize() < self._room:
            self._waiting.put(action)
        else:
            self._fail(f"has {self._room} reports waiting; more are lost")

    def flush(self, seconds: float) -> bool:
        """Waits until all that was told is done, for `seconds` at most; whether it is."""
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
                self._fail(f"{type(error).__name__}: {error}; training goes on")

    def _fail(self, said: str) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"{self.name} {said}")
