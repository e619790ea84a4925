"""The terminal: log lines, and a progress bar below them."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from armillary.data.console import printable
from armillary.train.reporting.metrics import StepMetrics, average

RECENT = 3600.0
"""The remaining time is estimated from the steps of the last RECENT seconds, at most a thousand steps."""


class Screen:
    """Prints lines of steps, with rates averaged over all steps since the previous line, and a progress bar.

    Args:
        steps: number of steps of the run.
        every: steps between lines; the first and the last step have a line too.
    """

    def __init__(self, steps: int, every: int) -> None:
        self.steps, self.every = steps, every
        self.console = Console(highlight=False, soft_wrap=True)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[loss]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            speed_estimate_period=RECENT,
        )
        self._task: TaskID | None = None
        self._first = 1
        self._since_line: list[StepMetrics] = []

    def on_resume(self, step: int) -> None:
        self._task = self.progress.add_task("training", total=self.steps, completed=step, loss="")
        self._first = step + 1
        self.progress.start()

    def step(self, metrics: StepMetrics) -> None:
        if self._task is not None:
            self.progress.update(self._task, advance=1, loss=f"loss {metrics.loss:.4f}")
        self._since_line.append(metrics)
        if metrics.step in (self._first, self.steps) or metrics.step % self.every == 0:
            self.print(average(self._since_line).line())
            self._since_line = []

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        text = " ".join(f"{name}: {value:.4f}" for name, value in values.items())
        self.print(f"validation: step: {step} {text}")

    def event(self, kind: str, step: int, text: str) -> None:
        """Does nothing: events go to files, and `Reporter.say` prints lines."""

    def close(self) -> None:
        self.progress.stop()

    def print(self, line: str) -> None:
        self.console.print(printable(line), markup=False)
        self.console.file.flush()
