"""Long-context tasks whose answer is known: rows of any length, of which a rank makes only the tokens that it holds.

Every token is a hash of (seed, row, position), so nothing is stored or sent, and all ranks agree. `AssociativeRecall`
and `Needle` ask at the end of a row for what stood far before, `Copy` for all of its first half. `TaskRows` reads them
like any other rows, and `accuracy` says how many answers were right.

    task = AssociativeRecall(length=1 << 20, pairs=64, queries=64, keys=128, values=64, across=layout)
    rows = TaskRows(task, layout=layout, shard=0, rows_per_batch=1)
"""

from armillary.data.synthetic.accuracy import accuracy
from armillary.data.synthetic.by_name import build_task
from armillary.data.synthetic.copying import Copy
from armillary.data.synthetic.needle import Needle
from armillary.data.synthetic.recall import AssociativeRecall
from armillary.data.synthetic.rows import TaskRows
from armillary.data.synthetic.task import Task

__all__ = ["AssociativeRecall", "Copy", "Needle", "Task", "TaskRows", "accuracy", "build_task"]
