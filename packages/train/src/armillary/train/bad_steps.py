"""Steps with a loss or gradient that is not finite: names their rows, and skips them or stops the run."""

from __future__ import annotations

from collections.abc import Callable

from armillary.data import Batch, Batches
from armillary.train.config import TrainConfig
from armillary.train.step import StepResult


class BadSteps:
    """Stops the run, or skips the update, at a step without a finite loss or gradient.

    Args:
        rows: the source of the batches.

    Raises (from `count`):
        FloatingPointError: `bad_step` is "stop", or `bad_steps` came in a row; on every rank. Names the rows.
    """

    def __init__(self, config: TrainConfig, rows: Batches, say: Callable[[str], None]) -> None:
        self.config, self.rows, self.say, self.in_a_row = config, rows, say, 0

    def count(self, step: int, result: StepResult, batches: list[Batch]) -> None:
        """Counts a step; every rank must call it with the same result."""
        self.in_a_row = 0 if result.good else self.in_a_row + 1
        if result.good:
            return
        message = (
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; {self._bad_rows(result, batches)}"
        )
        if self.config.bad_step == "stop" or self.in_a_row >= self.config.bad_steps:
            repeated = "" if self.in_a_row == 1 else f", as for {self.in_a_row} steps in a row"
            raise FloatingPointError(f"{message}{repeated}")
        self.say(f"{message}; skipped, weights unchanged")

    def _bad_rows(self, result: StepResult, batches: list[Batch]) -> str:
        """Names the ranks and rows without a finite loss; all rows of the step if only the gradient is not finite."""
        bad = sorted({row for rows in result.bad_rows.values() for row in rows})
        if not bad:
            end = self.rows.state_dict()["rows"]
            return f"losses are finite on every rank, in rows {end - len(batches) * self.rows.rows_per_step}..{end - 1}"
        ranks = ", ".join(map(str, sorted(result.bad_rows)))
        shown = "; ".join(f"row {row} ({self.rows.describe(row)})" for row in bad[:4])
        omitted = f"; and {len(bad) - 4} more rows" if len(bad) > 4 else ""
        return f"no finite loss on rank{'s' * (len(result.bad_rows) > 1)} {ranks} in {shown}{omitted}"
