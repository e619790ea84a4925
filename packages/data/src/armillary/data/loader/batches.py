"""What all sources of rows have in common: which rows a step has, who reads them, and going on from a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from armillary.core import SequenceLayout
from armillary.data.loader.batch import Batch
from armillary.data.loader.prefetch import Prefetch


class Batches(ABC):
    """Batches of rows that are numbered without end; this rank's shard of them.

    Step s has rows s * rows_per_step and following; each replica reads rows_per_batch of them, one after the other. So
    with as many rows to a step, the global batches are the same on any mesh. Nothing is communicated.

    Iterating goes on from where it was, or from where `load_state_dict` said. `batch` gives any step's batch.

    Args:
        layout: cuts rows of `layout.length` tokens, N, into shards.
        shard: the shard of the layout that this rank holds.
        rows_per_batch: rows of one replica's batch, B.
        replica, replicas: this rank reads part `replica` of each global batch of rows_per_batch * replicas rows. Ranks
            that hold shards of the same rows have the same `replica`.
        ahead: batches that a thread makes before they are asked for.
        settings: all that decides what the rows hold, as JSON has it: a state of other settings is of other rows.

    Raises:
        ValueError: no such shard or replica, rows_per_batch or replicas below 1, ahead below 0.
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
        """Rows of one step, all replicas together."""
        return self._rows_per_batch * self._replicas

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one step, all replicas and shards together."""
        return self.rows_per_step * self._layout.length

    def batch(self, step: int) -> Batch:
        """The batch of any step, counted from 0, however far iteration has come.

        Raises:
            ValueError: a step below 0.
        """
        check_minimum(0, step=step)
        return self._batch_from(step * self.rows_per_step)

    def __iter__(self) -> Self:
        """Itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> Batch:
        """The next batch. If reading it fails, the one after that error is the same one again."""
        numbers = [self._rows_read + i * self.rows_per_step for i in range(1 + self._ahead)]
        batch = self._prefetch.get(numbers[0], numbers[1:])
        self._rows_read += self.rows_per_step
        return batch

    def state_dict(self) -> dict[str, Any]:
        """How many rows iteration has given out, on all ranks together, and what decides which ones those are."""
        return {"rows": self._rows_read, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Goes on where `state` was taken, on any mesh and with any number of rows to a step.

        Raises:
            ValueError: the state is of other rows, or not a state; nothing is changed then.
        """
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise ValueError(f"this state was taken with {name} {state.get(name)}, not {value}; rows would differ")
        rows = state.get("rows")
        if not isinstance(rows, int) or rows < 0:
            raise ValueError(f"this state was taken after {rows!r} rows; give one that state_dict made")
        self._rows_read = rows
        return self

    def _batch_from(self, first: int) -> Batch:
        """This rank's part of the global batch whose first row is number `first` of all rows."""
        first += self._replica * self._rows_per_batch
        return self._make_batch(range(first, first + self._rows_per_batch))

    @abstractmethod
    def _make_batch(self, rows: range) -> Batch:
        """This rank's shard of rows of these numbers. Called in a thread: no collectives there."""

    @abstractmethod
    def describe(self, row: int) -> str:
        """Where row `row` of all rows comes from, for a person who looks for it. Reads no tokens."""


def check_minimum(least: int, **values: int) -> None:
    """Raises ValueError where one of `values` is below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
