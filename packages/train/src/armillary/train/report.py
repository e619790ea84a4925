"""All that a run tells of itself while it runs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch.distributed as dist

from armillary.train.config import Config
from armillary.train.metrics import Screen, StepMetrics


class Reporter:
    """Hands what happened to whoever shows or keeps it; on rank 0, silent elsewhere. Used in a `with` block."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.screen = Screen(config.train.steps, visible=dist.get_rank() == 0)

    def __enter__(self) -> Self:
        self.screen.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.screen.__exit__(kind, error, trace)

    def step(self, metrics: StepMetrics) -> None:
        """A step is done."""
        self.screen.advance()
        if metrics.step in (1, self.config.train.steps) or metrics.step % self.config.log.every == 0:
            self.screen.print(metrics.line())

    def validated(self, step: int, values: dict[str, float]) -> None:
        """The model of this step was looked at."""
        shown = " ".join(f"{name}: {value:.4f}" for name, value in values.items())
        self.screen.print(f"validation: step: {step} {shown}")

    def say(self, line: str) -> None:
        """Something else that a person should know."""
        self.screen.print(line)
