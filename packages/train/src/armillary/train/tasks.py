"""Rows of synthetic long-context tasks, for training or validation."""

from __future__ import annotations

from armillary.attention import Method
from armillary.core import SequenceLayout
from armillary.data.synthetic import TaskRows, build_task
from armillary.train.config import Config, DataConfig

FIRST_HELD_OUT_ROW = 2**40
"""Training reads a task's rows from number 0 on, validation from this number on."""


def task_vocabulary(data: DataConfig) -> int | None:
    """Returns the vocabulary size of the task that is trained on; None if the run trains on text."""
    if data.task is None:
        return None
    layout = SequenceLayout.contiguous(data.sequence_length, 1)  # any: the vocabulary does not depend on the layout
    return build_task(data.task, layout, pairs=data.pairs, symbols=data.symbols).vocab_size


def load_task(name: str, config: Config, vocabulary: int, attention: Method, replica: int, held_out: bool) -> TaskRows:
    """Returns this rank's rows of a task.

    Args:
        vocabulary: vocabulary size of the model.
        attention: decides which tokens of a row this rank generates.
        replica: this rank's data-parallel index.
        held_out: True: rows for validation; False: rows for training.

    Raises:
        ValueError: rows too short for the task, or too few symbols.
    """
    layout = attention.layout(config.data.sequence_length, config.data.layout)
    return TaskRows(
        build_task(name, layout, config.train.seed, vocabulary, pairs=config.data.pairs, symbols=config.data.symbols),
        layout=layout,
        shard=attention.shard,
        rows_per_batch=config.rows_per_batch,
        replica=replica,
        replicas=config.replicas,
        first_row=FIRST_HELD_OUT_ROW if held_out else 0,
    )
