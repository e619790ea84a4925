"""Long-context tasks with known answers, as long as a row, to be trained on or looked at."""

from __future__ import annotations

from armillary.attention import Method
from armillary.core import SequenceLayout
from armillary.data.synthetic import AssociativeRecall, Copy, Needle, Task, TaskRows
from armillary.train.config import Config, DataConfig

HELD_OUT = 2**40
"""The first of the rows that are never trained on."""


def build_task(name: str, data: DataConfig, seed: int, layout: SequenceLayout, vocabulary: int | None = None) -> Task:
    """The task of that name, with rows of `layout.length` tokens.

    Args:
        layout: where it has several shards, recall asks for what another shard holds.
        vocabulary: of the model; symbols are fewer where it has no room for more.

    Raises:
        ValueError: rows too short for it, or too few symbols.
    """
    length, symbols = layout.length, data.symbols
    kinds, others = (1, 1) if name == "copy" else (3, 0)
    if vocabulary is not None:
        symbols = min(symbols, (vocabulary - others) // kinds)
    match name:
        case "recall":
            return AssociativeRecall(
                length,
                data.pairs,
                data.pairs,
                keys=symbols,
                values=symbols,
                fillers=symbols,
                across=layout if layout.shards > 1 else None,
                seed=seed,
            )
        case "needle":
            return Needle(length, keys=symbols, values=symbols, fillers=symbols, seed=seed)
        case _:
            return Copy(length, symbols=symbols, seed=seed)


def task_tokens(data: DataConfig) -> int | None:
    """Tokens that a model of the task to be trained on must know; None for text."""
    if data.task is None:
        return None
    return build_task(data.task, data, 0, SequenceLayout.contiguous(data.sequence_length, 1)).vocab_size


def load_task(name: str, config: Config, vocabulary: int, attention: Method, replica: int, held_out: bool) -> TaskRows:
    """Rows of the task for this rank: those to be trained on, or those `held_out`. Errors as in `build_task`."""
    layout = attention.layout(config.data.sequence_length, config.data.layout)
    return TaskRows(
        build_task(name, config.data, config.train.seed, layout, vocabulary),
        layout=layout,
        shard=attention.shard,
        rows_per_batch=config.rows_per_batch,
        replica=replica,
        replicas=config.replicas,
        first_row=HELD_OUT if held_out else 0,
    )
