"""The interface of sinks."""

from __future__ import annotations

from typing import Protocol

from armillary.train.reporting.metrics import StepMetrics


class Sink(Protocol):
    """Receives the events of a run, in the order of steps; may raise any error."""

    def resumed(self, step: int) -> None:
        """Called first: training continues after `step`, 0 for a new run. Records of later steps are void."""
        ...

    def step(self, metrics: StepMetrics) -> None: ...

    def validated(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, kind: str, step: int, text: str) -> None:
        """Something else happened: saved, skipped, stopped, finished, failed."""
        ...

    def close(self) -> None: ...
