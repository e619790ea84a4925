"""Sinks of a run's reports: the terminal, TensorBoard, and Weights & Biases. `journal` has that of metrics.jsonl."""

from __future__ import annotations

import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from armillary.core.parts import read_file, write_whole
from armillary.data.console import printable
from armillary.train.reporting.metrics import StepMetrics, average

RECENT = 3600.0
"""The remaining time is estimated from the steps of the last RECENT seconds, at most a thousand steps."""


class Sink:
    """Receives the reports of a run, in the order of steps. A method may raise any error."""

    def on_resume(self, step: int) -> None:
        """Called first. Training starts after `step`, 0 for a new run; the sink discards records of later steps."""

    def step(self, metrics: StepMetrics) -> None:
        """Receives the metrics of a step."""

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        """Receives the results of a validation after `step`, by name."""

    def event(self, kind: str, step: int, text: str) -> None:
        """Receives an event of kind "saving", "saved", "skipped", "stopped", "finished" or "failed"."""

    def close(self) -> None:
        """Called last, also if `on_resume` was not called."""


class Screen(Sink):
    """Prints lines of steps, with rates averaged over all steps since the previous line, and a progress bar below them.

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

    def close(self) -> None:
        self.progress.stop()

    def print(self, line: str) -> None:
        self.console.print(printable(line), markup=False)
        self.console.file.flush()


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Returns the metrics of a step by their names in trackers; memory in GiB, rates per device."""
    values = {
        "train/loss": metrics.loss,
        "train/grad_norm": metrics.grad_norm,
        "train/learning_rate": metrics.learning_rate,
        "train/tokens": metrics.tokens,
        "device/memory_gib": metrics.memory / 2**30,
        "device/tokens_per_second": metrics.tokens_per_second,
        "device/tflops": metrics.tflops,
    }
    return values if metrics.utilisation is None else values | {"device/mfu": metrics.utilisation}


class TensorBoard(Sink):
    """Writes TensorBoard's event files. Steps that are trained again after a restart replace their records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def on_resume(self, step: int) -> None:
        tensorboard = import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(self.folder), purge_step=step + 1, flush_secs=30)

    def step(self, metrics: StepMetrics) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"validation/{name}", value, step)

    def event(self, kind: str, step: int, text: str) -> None:
        self._writer.add_text("events", f"{kind} {text}", step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Sink):
    """Logs to a run at Weights & Biases. A restart resumes that run, by the id in the output folder.

    Args:
        config: configuration of the run, shown beside its curves.
    """

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        self.project, self.folder, self.config = project, folder, config
        self._run: Any = None

    def on_resume(self, step: int) -> None:
        path = self.folder / "wandb-id"
        if step == 0 or not path.exists():
            write_whole(path, lambda partial: partial.write_text(secrets.token_hex(4)))
        self._run = import_module("wandb").init(
            project=self.project,
            dir=self.folder,
            id=read_file(path).decode(),
            resume="allow",
            config=self.config,
            allow_val_change=True,
        )
        # wandb's own step can only increase, but after a restart our step goes back to the checkpoint's.
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: StepMetrics) -> None:
        self._run.log({"step": metrics.step} | scalars(metrics))

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step} | {f"validation/{name}": value for name, value in values.items()})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
