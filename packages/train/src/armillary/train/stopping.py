"""Ending before the last step: when asked to, and when the numbers go bad."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from armillary.data import Batch
from armillary.train.config import TrainConfig
from armillary.train.step import StepResult


class StopSignal:
    """Hears SIGTERM and SIGUSR1 within a `with` block; training then ends after the step in hand, on all ranks."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.heard = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def asked(self, device: torch.device) -> bool:
        """Whether any rank has heard a signal: the same on all ranks, which must all call it."""
        heard = torch.tensor(float(self.heard), device=device)
        dist.all_reduce(heard)
        return heard.item() > 0


class BadSteps:
    """Decides what a step without a finite loss or gradient means.

    Raises (from `count`):
        FloatingPointError: the configuration says to stop, or too many such steps came in a row. Names the batch.
    """

    def __init__(self, config: TrainConfig, say: Callable[[str], None]) -> None:
        self.config, self.say, self.in_a_row = config, say, 0

    def count(self, step: int, result: StepResult, batches: list[Batch]) -> None:
        self.in_a_row = 0 if result.good else self.in_a_row + 1
        if result.good:
            return
        said = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if self.config.bad_step == "stop" or self.in_a_row >= self.config.bad_steps:
            raise FloatingPointError(said)
        self.say(f"{said}; skipped, the weights are as they were")
