"""Dispatches steps, validations and events to all sinks, each of which works in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from armillary.train.config.sections import Config
from armillary.train.reporting.journal import Journal
from armillary.train.reporting.metrics import StepMetrics
from armillary.train.reporting.plot import draw_loss
from armillary.train.reporting.sinks import Screen, Sink, TensorBoard, WeightsAndBiases

PRINT_TIMEOUT, CLOSE_TIMEOUT = 5.0, 60.0
"""Maximum seconds to wait for a line to be printed or a sink's reports to be written, and for a sink to close."""


class Reporter:
    """Passes the steps, validations and events of a run to all sinks, on rank 0 alone. Used in a `with` block.

    An error of a sink does not stop training. A terminal that blocks delays each line by at most `PRINT_TIMEOUT`
    seconds. Any sink that blocks delays the end of the run by at most `PRINT_TIMEOUT + CLOSE_TIMEOUT` seconds.

    Args:
        fence: raises if another run has taken over the output folder; see `OutputLock`.
    """

    def __init__(self, config: Config, fence: Callable[[], None] = lambda: None) -> None:
        self.config, self.last_step, self._started = config, 0, False
        log, folder = config.log, config.train.output
        self._screen = Screen(config.train.steps, log.every)
        sinks: list[Sink] = [self._screen, Journal(folder / "metrics.jsonl", fence)]
        if log.tensorboard:
            sinks.append(TensorBoard(folder / "tb"))
        if log.wandb is not None:
            sinks.append(WeightsAndBiases(log.wandb, folder, asdict(config)))
        self._sinks = [GuardedSink(sink, self._complain) for sink in sinks] if dist.get_rank() == 0 else []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.event("failed", self.last_step, f"{type(error).__name__}: {error}")
        for sink in reversed(self._sinks):  # the screen is closed last, because it prints errors of the other sinks
            sink.close(CLOSE_TIMEOUT)

    def on_resume(self, step: int) -> None:
        """Starts all sinks. Training begins after `step`: 0, or the step of the checkpoint.

        Before this call only `say` has an effect, so that a run that is refused writes no files.
        """
        self.last_step, self._started = step, True
        self._submit_to_all(lambda sink: sink.on_resume(step))

    def step(self, metrics: StepMetrics) -> None:
        """Sends the metrics of a step to all sinks, and an event if the step was skipped."""
        self.last_step = metrics.step
        self._submit_to_all(lambda sink: sink.step(metrics))
        if not (isfinite(metrics.loss) and isfinite(metrics.grad_norm)):
            self.event("skipped", metrics.step)

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        """Sends the results of a validation after this step to all sinks."""
        self._submit_to_all(lambda sink: sink.on_validation(step, values))

    def event(self, kind: str, step: int, text: str = "") -> None:
        """Sends an event to all sinks. Files and trackers log it; the screen does not print it."""
        self._submit_to_all(lambda sink: sink.event(kind, step, text))

    def say(self, line: str) -> None:
        """Prints a line, and waits until it is printed, at most `PRINT_TIMEOUT` seconds."""
        for screen in self._sinks[:1]:  # none on ranks other than 0
            screen.submit(lambda _: self._screen.print(line))
            screen.flush(PRINT_TIMEOUT)

    def finish(self, step: int) -> Path | None:
        """Sends the last event, "finished" or "stopped" after `step`, and draws the run's plot if configured.

        Returns:
            The path of the plot; None if none was drawn.
        """
        self.event("finished" if step >= self.config.train.steps else "stopped", step)
        if not (self._sinks and self.config.log.plot):
            return None
        for sink in self._sinks:  # the plot is drawn from metrics.jsonl
            sink.flush(PRINT_TIMEOUT)
        try:
            return draw_loss(self.config.train.output)
        except Exception as error:  # an error of matplotlib must not fail the run
            self.say(f"no picture was drawn: {error}")
            return None

    def _submit_to_all(self, report: Callable[[Sink], None]) -> None:
        for sink in self._sinks if self._started else ():
            sink.submit(report)

    def _complain(self, error: str) -> None:
        self._sinks[0].submit(lambda _: self._screen.print(error))


class GuardedSink:
    """A sink of reports with its own thread, so that no error or wait of it affects training or other sinks.

    A full disk, a lost network or a stopped terminal loses only reports. Only the first error is printed; the sink is
    called again for the next report. The sinks do not share one thread: a sink that blocks, such as a terminal stopped
    by ^S, would silence the others, or would need a replacement thread and lose the reports that it now shows later.

    Args:
        sink: called only in the thread.
        complain: called with a line about the first error; in any thread.
        capacity: length of the queue; reports beyond it are dropped.
    """

    def __init__(self, sink: Sink, complain: Callable[[str], None], capacity: int = 10_000) -> None:
        self.sink, self.name, self._complain, self._capacity = sink, type(sink).__name__, complain, capacity
        self._complained = False
        self._queue: queue.SimpleQueue[Callable[[Sink], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def submit(self, report: Callable[[Sink], object]) -> None:
        """Queues a call of `report` with the sink, in the sink's thread. Never blocks."""
        if self._queue.qsize() < self._capacity:
            self._queue.put(report)
        else:
            self._fail(f"has {self._capacity} reports waiting; more are lost")

    def flush(self, seconds: float) -> bool:
        """Waits for all queued reports, at most `seconds`; returns False if some are not done."""
        event = threading.Event()
        self._queue.put(lambda _: event.set())
        return event.wait(seconds)

    def close(self, seconds: float) -> None:
        """Closes the sink and waits for its thread, at most `seconds`."""
        self._queue.put(lambda sink: sink.close())
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"is still busy after {seconds:.0f} s; unwritten reports are lost")

    def _work(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                report(self.sink)
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}; training continues")

    def _fail(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"{self.name} {reason}")
