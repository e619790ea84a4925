"""Synthetic long-context tasks with known answers, in rows of any length.

Every token is a function of (seed, row, position): a rank computes the tokens of its own shard, and nothing is stored
or sent. `AssociativeRecall` and `Needle` ask at the end of a row for tokens far before it, `Copy` for its first half.
`TaskRows` reads a task like any other rows, and `accuracy` counts right answers.

    task = AssociativeRecall(length=1 << 20, pairs=64, keys=128, values=64, across=layout)
    rows = TaskRows(task, layout=layout, shard=0, rows_per_batch=1)
"""

from armillary.data.synthetic.copying import Copy
from armillary.data.synthetic.needle import Needle
from armillary.data.synthetic.recall import AssociativeRecall
from armillary.data.synthetic.rows import TaskRows, accuracy, build_task
from armillary.data.synthetic.task import Task

__all__ = ["AssociativeRecall", "Copy", "Needle", "Task", "TaskRows", "accuracy", "build_task"]
