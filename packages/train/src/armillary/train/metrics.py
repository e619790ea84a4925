"""Measuring a run and showing it: one line per step in the ecosystem's format, a bar where a terminal is there."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L20": 119.5e12}
"""Dense bfloat16 FLOP/s, by a part of the device's name."""


@dataclass(frozen=True)
class StepMetrics:
    """What one step came to, over all ranks.

    Units: learning rate as is, tokens/s of each device, TFLOP/s of each device, memory in bytes.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    memory: int
    tokens_per_second: float
    tflops: float
    utilisation: float | None

    def line(self) -> str:
        mfu = "-" if self.utilisation is None else f"{self.utilisation:.1%}"
        return (
            f"step: {self.step} loss: {self.loss:.4f} grad_norm: {self.grad_norm:.4f} lr: {self.learning_rate:.2e} "
            f"memory: {self.memory / 2**30:.2f}GiB tps: {self.tokens_per_second:,.0f} "
            f"tflops: {self.tflops:.4g} mfu: {mfu}"
        )


def peak_memory(device: torch.device) -> int:
    """Most bytes that this rank has used: of GPU memory on cuda, of the process' resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in bfloat16 FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class Stopwatch:
    """Tokens and seconds of training, in all and in the last step. What is paused does not count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.tokens, self.seconds, self.last_rate = 0, 0.0, 0.0
        self.running_since = self.clock()

    def count(self, tokens: int) -> None:
        """Books `tokens` as trained on in the time that has run since the last call."""
        now = self.clock()
        passed, self.running_since = now - self.running_since, now
        self.seconds, self.tokens = self.seconds + passed, self.tokens + tokens
        self.last_rate = tokens / passed

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time within is not counted."""
        yield
        self.running_since = self.clock()


class Screen:
    """What a person sees: on rank 0 lines, under them a progress bar if the output is a terminal. Silent elsewhere."""

    def __init__(self, steps: int, visible: bool) -> None:
        self.console = Console(quiet=not visible, highlight=False, soft_wrap=True)
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, console=self.console, disable=not (visible and self.console.is_terminal))
        self.task = self.progress.add_task("training", total=steps)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def advance(self) -> None:
        self.progress.advance(self.task)

    def print(self, line: str) -> None:
        self.console.print(line, markup=False)
        self.console.file.flush()
