"""Rows of a synthetic task, read like any others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from armillary.core import SequenceLayout
from armillary.data.batch import Batch
from armillary.data.synthetic.task import Task, check_least


class TaskRows:
    """Batches of a task's rows; this rank's shard of them, which is all that it makes.

    Row i of replica r in step s is row (s * replicas + r) * rows_per_batch + i of the task, counted from `first_row`:
    with as many rows to a step, the global batches are the same on any mesh. A row is one document. Iterating reads
    one step after the other without end, and a saved state goes on behind the rows that were read.

    Args:
        task: the same on all ranks.
        layout: cuts rows of `task.length` tokens, N, into shards.
        shard: the shard of `layout` that this rank holds.
        rows_per_batch: rows of one replica's batch, B.
        replica, replicas: this rank reads part `replica` of each global batch of rows_per_batch * replicas rows. Ranks
            that hold shards of the same rows have the same `replica`.
        first_row: rows before it are not read: they are there for other uses, such as validation.

    Raises:
        ValueError: a layout of another length, no such shard or replica, rows_per_batch or replicas below 1, a
            negative first_row.
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
    ) -> None:
        check_least(1, rows_per_batch=rows_per_batch, replicas=replicas)
        check_least(0, first_row=first_row)
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} is not one of the {replicas} replicas 0..{replicas - 1}")
        if layout.length != task.length:
            raise ValueError(f"the layout has {layout.length} positions; rows of {task!r} have {task.length}")
        self._task, self._layout, self._positions = task, layout, layout.positions(shard)
        self._rows_per_batch, self._replica, self._replicas = rows_per_batch, replica, replicas
        self._first_row, self._read = first_row, 0

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one step, all replicas and shards together."""
        return self._rows_per_step * self._layout.length

    def batch(self, step: int) -> Batch:
        """The batch of any step, counted from 0; iterating doesn't notice.

        Raises:
            ValueError: a step below 0.
        """
        if step < 0:
            raise ValueError(f"steps count from 0; got {step}")
        return self._batch(step * self._rows_per_step)

    def __iter__(self) -> TaskRows:
        """Itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> Batch:
        """The next step's batch."""
        batch = self._batch(self._read)
        self._read += self._rows_per_step
        return batch

    def state_dict(self) -> dict[str, Any]:
        """How many rows all replicas have read together, and of which task; the same on all ranks."""
        return {"rows": self._read, "first_row": self._first_row, "task": repr(self._task)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the rows that were read when `state` was saved, on whatever mesh and with any rows_per_batch.

        Raises:
            ValueError: it is the state of another task, or of another `first_row`; nothing is changed then.
        """
        for name, mine in self.state_dict().items():
            if name not in state:
                raise ValueError(f"the state has no {name!r}, only {sorted(state)}; give what state_dict() returned")
            if name != "rows" and state[name] != mine:
                raise ValueError(f"the state was saved with {name} {state[name]}; these rows have {mine}")
        check_least(0, rows=state["rows"])
        self._read = state["rows"]

    @property
    def _rows_per_step(self) -> int:
        return self._rows_per_batch * self._replicas

    def _batch(self, read: int) -> Batch:
        """This rank's part of the step that comes after `read` rows."""
        first = self._first_row + read + self._replica * self._rows_per_batch
        rows, at = range(first, first + self._rows_per_batch), self._positions
        made = [(self._task.tokens(row, at), self._task.labels(row, at)) for row in rows]
        return Batch(
            tokens=torch.stack([tokens for tokens, _ in made]),
            labels=torch.stack([labels for _, labels in made]),
            positions=at.repeat(len(rows), 1),
            documents=((0, self._layout.length),) * len(rows),
            layout=self._layout,
        )
