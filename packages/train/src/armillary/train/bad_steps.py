"""Steps with a loss or gradient that is not finite: names their rows, and skips them or stops the run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from armillary.data import Batch
from armillary.train.run import Run
from armillary.train.step import StepResult, local_loss


class BadSteps:
    """Counts consecutive bad steps: steps whose loss or gradient norm is not finite, and whose update was skipped.

    Raises (from `count`):
        FloatingPointError: after a bad step if `train.bad_step` is "stop", or after `train.bad_steps` of them in a
            row; on every rank. The message names the rows.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self.run, self.say, self.in_a_row = run, say, 0

    def count(self, step: int, result: StepResult, batches: list[Batch]) -> None:
        """Counts a step; every rank must call it with the same result."""
        if result.good:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        cause = describe_bad_rows(self.run, batches)
        message = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; {cause}"
        config = self.run.config.train
        if config.bad_step == "stop" or self.in_a_row >= config.bad_steps:
            repetition = "" if self.in_a_row == 1 else f", as for {self.in_a_row} steps in a row"
            raise FloatingPointError(f"{message}{repetition}")
        self.say(f"{message}; skipped, weights unchanged")


def describe_bad_rows(run: Run, batches: list[Batch]) -> str:
    """Returns text that names the ranks and rows whose loss is not finite, or all rows if only the gradient is not."""
    by_rank, rows = bad_rows(run, batches), run.training
    bad = sorted({row for of_rank in by_rank.values() for row in of_rank})
    if not bad:
        end = rows.state_dict()["rows"]
        return f"losses are finite on every rank, in rows {end - len(batches) * rows.rows_per_step}..{end - 1}"
    ranks = ", ".join(map(str, sorted(by_rank)))
    row_texts = "; ".join(f"row {row} ({rows.describe(row)})" for row in bad[:4])
    suffix = f"; and {len(bad) - 4} more rows" if len(bad) > 4 else ""
    return f"no finite loss on rank{'s' * (len(by_rank) > 1)} {ranks} in {row_texts}{suffix}"


@torch.no_grad()
def bad_rows(run: Run, batches: list[Batch]) -> dict[int, list[int]]:
    """Returns the rows whose loss is not finite, by rank. Every rank must call it.

    Runs forward again, on one row at a time, with the weights of the bad step, which the skipped update left unchanged.
    """
    single_rows = [batch.of_row(i) for batch in batches for i in range(len(batch.rows))]
    own_rows = [batch.rows.start for batch in single_rows if not local_loss(run, batch)[0].isfinite()]
    rows_by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows_by_rank, own_rows)
    return {rank: rows for rank, rows in enumerate(rows_by_rank) if rows}
