"""Reports of a run: steps, validations and events, on the terminal, in metrics.jsonl, and in experiment trackers.

`Reporter` passes them to all sinks, each of which works in a thread of its own. `draw_loss` draws a run from its
metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from armillary.core.internal import open_file, parse_json, read_file, write_whole
from armillary.data.console import picture, printable
from armillary.train.config.sections import Config
from armillary.train.metrics import StepMetrics, average

# Maximum seconds to wait for a line to be printed or a sink's reports to be written, and for a sink to close: so long
# does a terminal or a disk that blocks delay a run. Errors of sinks do not stop it.
PRINT_TIMEOUT, CLOSE_TIMEOUT = 5.0, 60.0


class Reporter:
    """Passes the steps, validations and events of a run to all sinks, on rank 0 alone. Used in a `with` block.

    Args:
        fence: raises if another run has taken over the output folder; see `OutputLock`.
    """

    def __init__(self, config: Config, fence: Callable[[], None] = lambda: None) -> None:
        self.config, self.last_step, self._started = config, 0, False
        log, folder = config.log, config.train.output
        # The screen is the first sink: `say` and `_complain` print there.
        self._screen = Screen(config.train.steps, log.every)
        sinks: list[Sink] = [self._screen, Journal(folder / "metrics.jsonl", fence)]
        if log.tensorboard:
            sinks.append(TensorBoard(folder / "tb"))
        if log.wandb is not None:
            sinks.append(WeightsAndBiases(log.wandb, folder, asdict(config)))
        self._sinks = [GuardedSink(sink, self._complain) for sink in sinks] if dist.get_rank() == 0 else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.event("failed", self.last_step, f"{type(error).__name__}: {error}")
        for sink in reversed(self._sinks):  # the screen is closed last, because it prints errors of the other sinks
            sink.close(CLOSE_TIMEOUT)

    def on_resume(self, step: int) -> None:
        """Starts all sinks. Training begins after `step`: 0, or the step of the checkpoint."""
        # Before this call only `say` has an effect, so that a run that is refused writes no files.
        self.last_step, self._started = step, True
        self._submit_to_all(lambda sink: sink.on_resume(step))

    def step(self, metrics: StepMetrics) -> None:
        """Sends the metrics of a step to all sinks, and an event if the step was skipped."""
        self.last_step = metrics.step
        self._submit_to_all(lambda sink: sink.step(metrics))
        if not (isfinite(metrics.loss) and isfinite(metrics.grad_norm)):
            self.event("skipped", metrics.step)

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        self._submit_to_all(lambda sink: sink.on_validation(step, values))

    def event(self, kind: str, step: int, text: str = "") -> None:
        self._submit_to_all(lambda sink: sink.event(kind, step, text))

    def say(self, line: str) -> None:
        """Prints a line, and waits until it is printed, at most `PRINT_TIMEOUT` seconds."""
        for screen in self._sinks[:1]:  # none on ranks other than 0
            screen.submit(lambda _: self._screen.print(line))
            screen.flush(PRINT_TIMEOUT)

    def finish(self, step: int) -> Path | None:
        """Sends the last event, "finished" or "stopped"; draws the run's plot if configured, and returns its path."""
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

    A full disk, a lost network or a stopped terminal loses only reports, beyond `capacity` of them. Only the first
    error is passed to `complain`, in any thread; the sink is called again for the next report.
    """

    def __init__(self, sink: Sink, complain: Callable[[str], None], capacity: int = 10_000) -> None:
        self.sink, self.name, self._complain, self._capacity = sink, type(sink).__name__, complain, capacity
        self._complained = False
        # A thread of its own: a sink that blocks, such as a terminal stopped by ^S, would silence the others, or would
        # need a replacement thread and lose the reports that it now shows later.
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


# The remaining time is estimated from the steps of the last RECENT seconds, at most a thousand steps.
RECENT = 3600.0


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

    Every `every` steps have a line; the first and the last step have one too.
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
    """Logs to a run at Weights & Biases. A restart resumes that run, by the id in the output folder."""

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


# Size of the file's buffer in bytes, which keeps lines while the disk is full.
BUFFER = 1 << 20


class Journal(Sink):
    """Writes metrics.jsonl. A number that is not finite becomes null, and its line has "bad": true.

    `fence` is called before each change of the file.
    """

    def __init__(self, path: Path, fence: Callable[[], None] = lambda: None) -> None:
        self.path, self._fence = path, fence
        self._file: BinaryIO | None = None

    def on_resume(self, step: int) -> None:
        self._fence()
        cut_records(self.path, step)
        self.event("resumed" if step else "started", step, "")

    def step(self, metrics: StepMetrics) -> None:
        self._write(asdict(metrics))

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        self._write({"step": step, "validation": values})

    def event(self, kind: str, step: int, text: str) -> None:
        self._write({"step": step, "event": kind} | ({"text": text} if text else {}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._fence()
        if self._file is None:
            self._file = self.path.open("ab", buffering=BUFFER)
        finite_record = replace_nonfinite(record)
        marked_record = finite_record if finite_record == record else finite_record | {"bad": True}
        self._file.write(json.dumps(marked_record | {"time": time.time()}, allow_nan=False).encode() + b"\n")
        # On a full disk this raises and keeps the lines in the buffer; the next flush that succeeds writes them.
        self._file.flush()


def replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):  # JSON has no NaN and no infinities
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def cut_records(path: Path, step: int) -> None:
    """Truncates the file before the first record of a step after `step`, or before an incomplete line."""
    if not path.exists():
        return
    with open_file(path) as file:
        kept_bytes = 0
        for line in file:
            record = parse_record(line)
            if not line.endswith(b"\n") or (record is not None and record["step"] > step):
                break
            kept_bytes += len(line)
    # This works on a full disk too. Later lines have later steps too, except some events of background saves.
    os.truncate(path, kept_bytes)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file, oldest first; skips lines that are no record."""
    with open_file(path) as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record


def parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def draw_loss(folder: Path) -> Path:
    """Draws the run in an output folder as loss.png in this folder, and returns its path.

    Raises ValueError if the run has no step yet, ImportError without matplotlib, and OSError.
    """
    records = list(read_records(folder / "metrics.jsonl"))
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no step yet")
    # Numbers that are not finite are null in the file, and NaN here.
    numbers, losses, norms, rates = (
        np.array([record[name] for record in steps], dtype=np.float64)
        for name in ("step", "loss", "grad_norm", "learning_rate")
    )
    # The mean of the finite losses around each step is a difference of prefix sums. At the beginning, where losses fall
    # fast, windows are narrower but symmetric: with more losses after a step than before it, the mean would be too low.
    finite, indices, half = np.isfinite(losses), np.arange(len(losses)), len(losses) // 50
    reach = np.minimum(indices, half)
    totals = np.pad(np.cumsum([np.where(finite, losses, 0.0), finite], axis=1), ((0, 0), (1, 0)))
    sums, counts = totals[:, np.minimum(indices + reach + 1, len(losses))] - totals[:, indices - reach]
    means = np.divide(sums, counts, out=np.full(len(losses), np.nan), where=counts > 0)
    path = folder / "loss.png"
    with picture(path, (9, 6.5), "armillary-train") as figure:
        above, below = figure.subplots(2, sharex=True, height_ratios=[3, 1])
        above.plot(numbers, losses, color="C0", alpha=0.25, linewidth=0.8, label="each step")
        above.plot(numbers, means, color="C0", linewidth=1.8, label=f"mean of {2 * half + 1} steps around each")
        validation = [(x["step"], x["validation"].get("loss")) for x in records if "validation" in x]
        if validation:
            points = np.array(validation, dtype=np.float64)
            label = f"validation, {points[-1, 1]:.4f} in the end"
            above.plot(*points.T, "o", color="C1", markersize=5, label=label)
        restarts = [record["step"] for record in records if record.get("event") == "resumed"]
        for i, step in enumerate(restarts):
            above.axvline(step, color="gray", linestyle=":", linewidth=1, label=None if i else "restarted")
        for axes, values in ((above, losses[finite]), (below, norms[np.isfinite(norms)])):
            if len(values) and 0 < 10 * values.min() < values.max():
                axes.set_yscale("log")
        above.set(title=str(folder), ylabel="loss (nats a token)")
        above.legend(frameon=False)
        above.grid(alpha=0.25)
        below.plot(numbers, norms, color="C0", alpha=0.35, linewidth=0.8)
        below.set(xlabel="step", ylabel="gradient norm (solid)")
        rate = below.twinx()
        rate.plot(numbers, rates, color="C0", linestyle="--", linewidth=1.5)
        rate.set(ylabel="learning rate (dashed)", ylim=(0, None))
    return path
