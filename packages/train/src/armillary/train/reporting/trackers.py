"""Experiment trackers: TensorBoard and Weights & Biases, if installed and enabled."""

from __future__ import annotations

import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from armillary.core.parts import read_file, write_whole
from armillary.train.reporting.metrics import StepMetrics


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


class TensorBoard:
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


class WeightsAndBiases:
    """Logs to a run at Weights & Biases. A restart resumes that run, by the id in the output folder.

    Args:
        config: configuration of the run, shown beside its curves.
    """

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        self.project, self.folder, self.config = project, folder, config
        self._run: Any = None

    def on_resume(self, step: int) -> None:
        self._run = import_module("wandb").init(
            project=self.project,
            dir=self.folder,
            id=self._id(fresh=step == 0),
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

    def event(self, kind: str, step: int, text: str) -> None:
        """Does nothing, because only curves are logged there."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _id(self, fresh: bool) -> str:
        path = self.folder / "wandb-id"
        if fresh or not path.exists():
            write_whole(path, lambda partial: partial.write_text(secrets.token_hex(4)))
        return read_file(path).decode()
