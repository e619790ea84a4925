"""Batches: one rank's shard of the rows of each step, read ahead in a thread, with a state to resume from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from armillary.core import LabelTriples, SequenceLayout
from armillary.core.internal import count
from armillary.data.store import IGNORE

T = TypeVar("T")

Documents = tuple[tuple[int, ...], ...]
"""Document boundaries of each row of a batch."""
Parents = tuple[tuple[int, ...], ...]
"""For each row of trees in a batch, the parent of each of its segments, or -1."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's shard of B rows of N tokens: T tokens of each.

    Args:
        tokens: int64 [B, T].
        labels: int64 [B, T], for each token the next token of its document, or `IGNORE`. In rows of trees these are
            `LabelTriples`: a token has several labels if the tree branches after it.
        positions: int64 [B, T], counted from the start of the row, or with `reset_positions` from the start of the
            document in the row; in rows of trees along the path from the root.
        documents: boundaries of each row's documents (0, end of the first, ..., N), equal on all shards. Attention
            masks take them as their argument `documents`. Padding at the end of a row counts as a document. For trees
            these are the boundaries of segments.
        layout: layout of the rows over shards.
        rows: numbers of the B rows, counted over all steps; empty for batches that no loader has made.
        parents: for rows of trees, the parent of each segment of each row, or -1; else None. `documents` and `parents`
            define the mask of trees.
    """

    tokens: Tensor
    labels: Tensor | LabelTriples
    positions: Tensor
    documents: Documents
    layout: SequenceLayout
    rows: range = range(0)
    parents: Parents | None = None

    @property
    def labelled(self) -> float:
        """Number of labels in this shard, or the sum of their weights."""
        if isinstance(self.labels, LabelTriples):
            return float(self.labels.weights.sum())
        return int((self.labels != IGNORE).sum())

    def of_row(self, i: int) -> Batch:
        """Returns a batch of row `i` alone."""
        row = slice(i, i + 1)
        return replace(
            self,
            tokens=self.tokens[row],
            labels=self.labels.row(i) if isinstance(self.labels, LabelTriples) else self.labels[row],
            positions=self.positions[row],
            documents=self.documents[row],
            rows=self.rows[row],
            parents=None if self.parents is None else self.parents[row],
        )


class Batches(ABC):
    """This rank's shard of batches of rows. Rows are numbered from 0, without end.

    Step s reads the global batch of rows s * rows_per_step to (s + 1) * rows_per_step - 1, of which each replica reads
    `rows_per_batch` consecutive rows. So global batches are equal on all meshes with the same number of rows per step.
    No communication.

    Args:
        layout: layout of a row's `layout.length` tokens, N, over shards.
        shard: this rank's shard of the layout.
        rows_per_batch: rows of one replica's batch, B.
        replica, replicas: index of this rank's data-parallel group, and number of these groups. Ranks that share rows
            have the same `replica`.
        ahead: number of batches to prefetch in a thread.
        settings: JSON values on which the tokens of rows depend. `load_state_dict` refuses a state with other values.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        shard: int,
        rows_per_batch: int,
        replica: int,
        replicas: int,
        ahead: int,
        settings: dict[str, Any],
    ) -> None:
        check_minimum(1, rows_per_batch=rows_per_batch, replicas=replicas)
        check_minimum(0, ahead=ahead)
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} is not one of the {replicas} replicas 0..{replicas - 1}")
        self._layout, self._shard, self._positions = layout, shard, layout.positions(shard)
        self._rows_per_batch, self._replica, self._replicas = rows_per_batch, replica, replicas
        self._settings, self._rows_read, self._ahead = settings, 0, ahead
        self._prefetch = Prefetch(self._batch_from)

    @property
    def rows_per_step(self) -> int:
        """Rows of one step over all replicas."""
        return self._rows_per_batch * self._replicas

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one global batch, of all replicas and shards."""
        return self.rows_per_step * self._layout.length

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 0, independently of iteration."""
        check_minimum(0, step=step)
        return self._batch_from(step * self.rows_per_step)

    def __iter__(self) -> Self:
        return self  # a second loop continues after the first one

    def __next__(self) -> Batch:
        """Returns the next batch. If reading it fails, the following call tries the same batch again."""
        # The first row of the current batch, and of the next ones to prefetch. The count advances only after a
        # successful read.
        first_rows = [self._rows_read + i * self.rows_per_step for i in range(1 + self._ahead)]
        batch = self._prefetch.get(first_rows[0], first_rows[1:])
        self._rows_read += self.rows_per_step
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of rows read by all replicas together, and the settings that rows depend on."""
        return {"rows": self._rows_read, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Resumes from `state`, on any mesh and with any number of rows per step.

        Raises:
            ValueError: the state was saved with other settings, or is not a state. The loader is unchanged.
        """
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise ValueError(f"this state was taken with {name} {state.get(name)}, not {value}; rows would differ")
        self._rows_read = count("rows", state.get("rows"))
        return self

    def _batch_from(self, first: int) -> Batch:
        """Returns this replica's part of the global batch that begins with row `first`."""
        first += self._replica * self._rows_per_batch
        return self._make_batch(range(first, first + self._rows_per_batch))

    @abstractmethod
    def _make_batch(self, rows: range) -> Batch:
        """Returns this rank's shard of the rows numbered `rows`. May run in a thread and must not call collectives."""

    @abstractmethod
    def describe(self, row: int) -> str:
        """Returns a description of the source of row number `row`. Reads no tokens."""


class Prefetch(Generic[T]):
    """Numbered items, which one thread makes by `make(number)` before they are needed."""

    # `get` raises an exception of `make` with its traceback, and the next `get` of that number calls `make` again: a
    # run survives a disk that recovers.

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make, self._process = make, -1
        self._futures: dict[int, Future[T]] = {}

    def get(self, number: int, ahead: Sequence[int] = ()) -> T:
        """Returns item `number`, starts making the items in `ahead`, and discards all other items."""
        if self._process != os.getpid():  # the first call of this process: threads do not survive a fork
            self._process, self._futures = os.getpid(), {}
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        numbers = [number, *ahead]
        for obsolete in self._futures.keys() - set(numbers):
            self._futures.pop(obsolete).cancel()
        for n in numbers:
            if n not in self._futures:
                self._futures[n] = self._thread.submit(self._make, n)
        return self._futures.pop(number).result()


def check_minimum(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}; got {value}")
