"""The interface of sinks."""

from __future__ import annotations

from typing import Protocol

from armillary.train.reporting.metrics import StepMetrics


class Sink(Protocol):
    """Receives the events of a run, in the order of steps; may raise any error."""

    def on_resume(self, step: int) -> None:
        """Called first. Training starts after `step`, 0 for a new run; the sink discards records of later steps."""
        ...

    def step(self, metrics: StepMetrics) -> None: ...

    def on_validation(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """Called for anything else. Kinds are "saved", "skipped", "stopped", "finished" and "failed"."""
        ...

    def close(self) -> None: ...
