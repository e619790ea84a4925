"""The picture of a run: its loss by step, from metrics.jsonl, with matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from armillary.data.console import picture
from armillary.train.reporting import journal


def draw_loss(folder: Path) -> Path:
    """Draws the run in an output folder as loss.png in this folder, and returns its path.

    The picture shows the loss, validations and restarts, and below them the gradient norm and the learning rate.

    Raises:
        ValueError: the run has no step yet.
        ImportError: matplotlib is not installed.
        OSError: a file cannot be read or written.
    """
    records = list(journal.read(folder / "metrics.jsonl"))
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
