"""The interface of sinks, which receive the reports of a run: the screen, files and experiment trackers."""

from __future__ import annotations

from typing import Protocol

from armillary.train.reporting.metrics import StepMetrics


class Sink(Protocol):
    """Receives the reports of a run, in the order of steps. A method may raise any error."""

    def on_resume(self, step: int) -> None:
        """Called first. Training starts after `step`, 0 for a new run; the sink discards records of later steps."""
        ...

    def step(self, metrics: StepMetrics) -> None: ...

    def on_validation(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """Receives an event of kind "saving", "saved", "skipped", "stopped", "finished" or "failed"."""
        ...

    def close(self) -> None: ...
