"""Rows of a synthetic task, read like any others."""

from __future__ import annotations

import torch

from armillary.core import SequenceLayout
from armillary.data.loader.batch import Batch
from armillary.data.loader.batches import Batches, check_least
from armillary.data.synthetic.task import Task


class TaskRows(Batches):
    """Batches of a task's rows; this rank's shard of them, which is all that it makes.

    Row i of replica r in step s is row (s * replicas + r) * rows_per_batch + i of the task, counted from `first_row`.
    A row is one document.

    Args:
        task: the same on all ranks.
        layout: cuts rows of `task.length` tokens, N, into shards.
        first_row: rows before it are not read: they are there for other uses, such as validation.
        shard, rows_per_batch, replica, replicas, ahead: as in `Batches`.

    Raises:
        ValueError: as in `Batches`, a layout of another length, a negative first_row.
    """

    def __init__(
        self,
        task: Task,
        *,
        layout: SequenceLayout,
        shard: int,
        rows_per_batch: int,
        replica: int = 0,
        replicas: int = 1,
        first_row: int = 0,
        ahead: int = 2,
    ) -> None:
        check_least(0, first_row=first_row)
        if layout.length != task.length:
            raise ValueError(f"the layout has {layout.length} positions; rows of {task!r} have {task.length}")
        self._task, self._first_row = task, first_row
        settings = {"first_row": first_row, "task": repr(task)}
        super().__init__(layout, shard, rows_per_batch, replica, replicas, ahead, settings)

    def _made_of(self, rows: range) -> Batch:
        at, numbers = self._positions, range(self._first_row + rows.start, self._first_row + rows.stop)
        return Batch(
            tokens=torch.stack([self._task.tokens(row, at) for row in numbers]),
            labels=torch.stack([self._task.labels(row, at) for row in numbers]),
            positions=at.repeat(len(rows), 1),
            documents=((0, self._layout.length),) * len(rows),
            layout=self._layout,
            rows=rows,
        )

    def describe(self, row: int) -> str:
        return f"row {self._first_row + row} of {self._task!r}"
