"""Dispatches steps, validations and events to all sinks."""

from __future__ import annotations

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
from armillary.train.reporting.screen import Screen
from armillary.train.reporting.sink import Sink
from armillary.train.reporting.trackers import TensorBoard, WeightsAndBiases
from armillary.train.runtime.background import GuardedSink

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
        is_rank_0 = dist.get_rank() == 0
        self._screen = Screen(config.train.steps, config.log.every)
        self._screens = [GuardedSink(self._screen, complain=_ignore)] if is_rank_0 else []
        self._sinks = self._screens + [
            GuardedSink(sink, complain=self._complain) for sink in file_sinks(config, fence) if is_rank_0
        ]

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
        for screen in self._screens:
            screen.submit(lambda: self._screen.print(line))
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
        return self._draw()

    def _draw(self) -> Path | None:
        try:
            return draw_loss(self.config.train.output)
        except Exception as error:  # an error of matplotlib must not fail the run
            self.say(f"no picture was drawn: {error}")
            return None

    def _submit_to_all(self, report: Callable[[Sink], None]) -> None:
        for guarded in self._sinks if self._started else ():
            guarded.submit(lambda sink=guarded.sink: report(sink))

    def _complain(self, error: str) -> None:
        for screen in self._screens:
            screen.submit(lambda: self._screen.print(error))


def file_sinks(config: Config, fence: Callable[[], None]) -> list[Sink]:
    """Returns the configured sinks besides the screen."""
    folder = config.train.output
    sinks: list[Sink] = [Journal(folder / "metrics.jsonl", fence)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tb"))
    if config.log.wandb is not None:
        sinks.append(WeightsAndBiases(config.log.wandb, folder, asdict(config)))
    return sinks


def _ignore(error: str) -> None:
    """Drops an error of the screen, which cannot be printed anywhere."""
