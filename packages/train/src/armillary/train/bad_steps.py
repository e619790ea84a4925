"""Steps with a loss or gradient that is not finite: which batch it was, and whether training continues."""

from __future__ import annotations

from collections.abc import Callable

from armillary.data import Batch, Batches
from armillary.train.config import TrainConfig
from armillary.train.step import StepResult


class BadSteps:
    """Stops the run, or skips the update, at a step without a finite loss or gradient.

    Args:
        rows: where batches come from.

    Raises (from `count`):
        FloatingPointError: the configuration says to stop, or too many such steps came in a row; on every rank. Names
            the batch.
    """

    def __init__(self, config: TrainConfig, rows: Batches, say: Callable[[str], None]) -> None:
        self.config, self.rows, self.say, self.in_a_row = config, rows, say, 0

    def count(self, step: int, result: StepResult, batches: list[Batch]) -> None:
        """Counts a step; every rank must call it with the same result."""
        self.in_a_row = 0 if result.good else self.in_a_row + 1
        if result.good:
            return
        said = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; {self._culprits(result, batches)}"
        if self.config.bad_step == "stop" or self.in_a_row >= self.config.bad_steps:
            many = "" if self.in_a_row == 1 else f", as for {self.in_a_row} steps in a row"
            raise FloatingPointError(f"{said}{many}")
        self.say(f"{said}; skipped, weights unchanged")

    def _culprits(self, result: StepResult, batches: list[Batch]) -> str:
        """The ranks and rows without a finite loss; all rows of the step where that was the gradient alone."""
        bad = sorted({row for found in result.bad_rows.values() for row in found})
        if not bad:
            end = self.rows.state_dict()["rows"]
            return f"losses are finite on every rank, in rows {end - len(batches) * self.rows.rows_per_step}..{end - 1}"
        ranks = ", ".join(map(str, sorted(result.bad_rows)))
        shown = "; ".join(f"row {row} ({self.rows.describe(row)})" for row in bad[:4])
        more = f"; and {len(bad) - 4} more rows" if len(bad) > 4 else ""
        return f"no finite loss on rank{'s' * (len(result.bad_rows) > 1)} {ranks} in {shown}{more}"
