"""Draws the loss, gradient norm and learning rate of runs of the trainer over each other, as a PNG.

python docs/tools/plot_runs.py outputs other-outputs --output both.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from armillary.train.logs import read_records

WINDOWS = 25
"""The strong line is a running mean over a window of about (number of steps) / WINDOWS steps."""
LOG_RATIO = 10.0
"""An axis is logarithmic if its values are above 0 and differ by more than this factor."""
Values = NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of runs")
    parser.add_argument("--output", type=Path, default=Path("losses.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args(argv)
    print(plot_runs(options.folders, options.output))


@dataclass
class Curves:
    """The curves in a run's metrics.jsonl. NaN stands for numbers that are not finite.

    Args:
        name: the run's output folder.
        steps: x values of `loss`, `grad_norm` and `learning_rate`.
        validation: validation loss by step.
        restarts: steps after which the run was resumed.
    """

    name: str
    steps: list[int] = field(default_factory=list[int])
    loss: list[float] = field(default_factory=list[float])
    grad_norm: list[float] = field(default_factory=list[float])
    learning_rate: list[float] = field(default_factory=list[float])
    validation: dict[int, float] = field(default_factory=dict[int, float])
    restarts: list[int] = field(default_factory=list[int])


def plot_runs(folders: Sequence[Path], path: Path) -> Path:
    """Draws the runs in these output folders over each other as a PNG at `path`, which is returned.

    Raises:
        ValueError: a folder without readable steps.
        OSError: the picture cannot be written.
    """
    runs = [read_curves(folder) for folder in folders]
    figure = Figure((9, 6.5), layout="constrained")
    # Above, the losses of all runs; below, gradient norms, with learning rates on an axis at the right.
    loss, norms = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    rates = norms.twinx()
    for i, run in enumerate(runs):
        draw_loss(loss, run, f"C{i}", alone=len(runs) == 1)
        norms.plot(run.steps, run.grad_norm, color=f"C{i}", alpha=0.35, linewidth=0.8)
        rates.plot(run.steps, run.learning_rate, color=f"C{i}", linestyle="--", linewidth=1.5)
    scale(loss, [value for run in runs for value in run.loss])
    scale(norms, [value for run in runs for value in run.grad_norm])
    loss.set_ylabel("loss (nats a token)")
    loss.legend(frameon=False)
    loss.grid(alpha=0.25)
    norms.set_xlabel("step")
    norms.set_ylabel("gradient norm (solid)")
    rates.set_ylabel("learning rate (dashed)")
    rates.set_ylim(bottom=0)
    rates.ticklabel_format(axis="y", scilimits=(-2, 3))
    figure.savefig(path, format="png", dpi=120)
    return path


def draw_loss(axes: Any, run: Curves, color: str, alone: bool) -> None:
    """Draws a run's losses: faint for each step, strong for the mean, points at validations, lines at restarts.

    Args:
        alone: True: the only run in the picture, with labels for each kind of line; False: one label for the run.
    """
    steps, losses = np.array(run.steps), np.array(run.loss, dtype=np.float64)
    last_validation = run.validation.get(max(run.validation, default=0))
    label = "" if last_validation is None else f", validation {last_validation:.4f}"
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8, label="each step" if alone else None)
    half = len(losses) // WINDOWS // 2
    name = f"mean of {2 * half + 1} steps around each" if alone else f"{run.name}{label}"
    axes.plot(steps, moving_average(losses, half), color=color, linewidth=1.8, label=name)
    validation = {"label": f"validation, {last_validation:.4f} in the end"} if alone and run.validation else {}
    marker_color = "C1" if alone else color
    axes.plot(list(run.validation), list(run.validation.values()), "o", color=marker_color, markersize=5, **validation)
    for i, step in enumerate(run.restarts):
        label = "restarted" if alone and i == 0 else None
        axes.axvline(step, color="gray" if alone else color, linestyle=":", linewidth=1, label=label)
    if alone:
        axes.set_title(run.name)


def read_curves(folder: Path) -> Curves:
    """Returns the curves of the run in an output folder.

    Raises:
        ValueError: the folder has no metrics.jsonl, or the file has no step.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; name the output folder of a run")
    curves = Curves(str(folder))
    for record in read_records(path):
        try:
            _add(curves, record)
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # a field is missing or of another type
            raise ValueError(f"{path}: the line {record} is no report of a run") from error
    if not curves.steps:
        raise ValueError(f"{path} has no step yet")
    return curves


def _add(curves: Curves, record: dict[str, Any]) -> None:
    if "loss" in record:
        curves.steps.append(record["step"])
        curves.loss.append(_number(record["loss"]))
        curves.grad_norm.append(_number(record["grad_norm"]))
        curves.learning_rate.append(_number(record["learning_rate"]))
    elif "validation" in record:
        curves.validation[record["step"]] = _number(record["validation"].get("loss"))
    elif record.get("event") == "resumed":
        curves.restarts.append(record["step"])


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def moving_average(values: Values, half: int) -> Values:
    """Returns for each value the mean of the finite values in a window with `half` values on either side.

    At the beginning of a run, where losses fall fast, windows are narrower but symmetric: with more losses after a step
    than before it, the mean would be too low.
    """
    finite = np.isfinite(values)
    counts = _window_sums(finite.astype(np.float64), half)
    sums = _window_sums(np.where(finite, values, 0.0), half)
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _window_sums(values: Values, half: int) -> Values:
    # The sum over a window is a difference of two prefix sums.
    totals = np.concatenate([[0.0], np.cumsum(values)])
    indices = np.arange(len(values))
    reach = np.minimum(indices, half)
    return totals[np.minimum(indices + reach + 1, len(values))] - totals[indices - reach]


def scale(axes: Any, values: Sequence[float]) -> None:
    """Makes the axis logarithmic if these values need it."""
    finite = [value for value in values if np.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > LOG_RATIO * min(finite):
        axes.set_yscale("log")


if __name__ == "__main__":
    main()
