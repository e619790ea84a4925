"""Batches of synthetic tasks, and the accuracy of answers."""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.core import SequenceLayout
from armillary.data.loader.batch import IGNORE, Batch
from armillary.data.loader.batches import Batches, check_minimum
from armillary.data.synthetic.copying import Copy
from armillary.data.synthetic.needle import Needle
from armillary.data.synthetic.recall import AssociativeRecall
from armillary.data.synthetic.task import Task


class TaskRows(Batches):
    """This rank's shard of batches of a task's rows; each row is one document.

    Row i of replica r in step s is the task's row first_row + (s * replicas + r) * rows_per_batch + i.

    Args:
        task: the task; equal on all ranks.
        layout: cuts rows of `task.length` tokens, N, into shards.
        first_row: the task's row at which reading starts, for example because earlier rows are for validation.
        shard, rows_per_batch, replica, replicas, ahead: as in `Batches`.

    Raises:
        ValueError: an argument that `Batches` refuses, a layout of another length, or a negative first_row.
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
        check_minimum(0, first_row=first_row)
        if layout.length != task.length:
            raise ValueError(f"the layout has {layout.length} positions; rows of {task!r} have {task.length}")
        self._task, self._first_row = task, first_row
        settings = {"first_row": first_row, "task": repr(task)}
        super().__init__(layout, shard, rows_per_batch, replica, replicas, ahead, settings)

    def _make_batch(self, rows: range) -> Batch:
        positions, task_rows = self._positions, range(self._first_row + rows.start, self._first_row + rows.stop)
        return Batch(
            tokens=torch.stack([self._task.tokens(row, positions) for row in task_rows]),
            labels=torch.stack([self._task.labels(row, positions) for row in task_rows]),
            positions=positions.repeat(len(rows), 1),
            documents=((0, self._layout.length),) * len(rows),
            layout=self._layout,
            rows=rows,
        )

    def describe(self, row: int) -> str:
        return f"row {self._first_row + row} of {self._task!r}"


def build_task(
    name: str, layout: SequenceLayout, seed: int = 0, vocabulary: int | None = None, *, pairs: int, symbols: int
) -> Task:
    """Returns the task "recall", "needle" or "copy" with rows of `layout.length` tokens.

    Args:
        layout: layout of the rows. With several shards, the pairs of recall are on other shards than their queries.
        vocabulary: vocabulary size of the model; limits the number of symbols.
        pairs: key-value pairs in a row of recall.
        symbols: number of different keys, values and fillers each, or of tokens to copy.

    Raises:
        ValueError: rows too short for the task, too few symbols, or a layout in which recall cannot place its pairs.
    """
    if name == "copy":
        return Copy(layout.length, symbols if vocabulary is None else min(symbols, vocabulary - 1), seed)
    if vocabulary is not None:
        symbols = min(symbols, vocabulary // 3)
    kinds = {"keys": symbols, "values": symbols, "fillers": symbols, "seed": seed}
    if name == "needle":
        return Needle(layout.length, **kinds)
    return AssociativeRecall(layout.length, pairs, **kinds, across=layout if layout.shards > 1 else None)


def accuracy(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of right answers and the number of labels: int64 scalars, to be summed over ranks and divided.

    Args:
        output: logits [..., V], or predicted tokens [...] of an integer dtype.
        labels: int64 [...]; `IGNORE` is not counted.

    Raises:
        ValueError: the shapes do not match, or predictions have a floating-point dtype.
    """
    predictions = output.argmax(-1) if output.dim() == labels.dim() + 1 else output
    if predictions.shape != labels.shape or predictions.is_floating_point():
        shape = tuple(labels.shape)
        raise ValueError(
            f"{output.dtype} {tuple(output.shape)} for labels {shape}; give logits {(*shape, 'V')} or integers {shape}"
        )
    is_labelled = labels != IGNORE
    return ((predictions == labels) & is_labelled).sum(), is_labelled.sum()
