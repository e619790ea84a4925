"""Rows of synthetic long-context tasks, for training or validation."""

from __future__ import annotations

from armillary.attention import Method
from armillary.core import SequenceLayout
from armillary.data.synthetic import TaskRows, build_task
from armillary.train.config import Config, DataConfig

HELD_OUT = 2**40
"""Number of the first row that is never trained on."""


def task_tokens(data: DataConfig) -> int | None:
    """Returns the vocabulary size of the task that is trained on; None for text."""
    if data.task is None:
        return None
    layout = SequenceLayout.contiguous(data.sequence_length, 1)
    return build_task(data.task, layout, pairs=data.pairs, symbols=data.symbols).vocab_size


def load_task(name: str, config: Config, vocabulary: int, attention: Method, replica: int, held_out: bool) -> TaskRows:
    """Returns this rank's rows of the task, for training or (`held_out`) for validation. Errors as in `build_task`."""
    layout = attention.layout(config.data.sequence_length, config.data.layout)
    return TaskRows(
        build_task(name, layout, config.train.seed, vocabulary, pairs=config.data.pairs, symbols=config.data.symbols),
        layout=layout,
        shard=attention.shard,
        rows_per_batch=config.rows_per_batch,
        replica=replica,
        replicas=config.replicas,
        first_row=HELD_OUT if held_out else 0,
    )
