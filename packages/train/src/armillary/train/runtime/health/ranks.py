"""Agreement between all ranks of a run: an action that fails on one rank raises on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

R = TypeVar("R")
Failure = tuple[type[Exception], str]

SHARED_TYPES = (ValueError, OSError)
"""Errors that keep their type on the other ranks; any other becomes a RuntimeError there."""


class Ranks:
    """All ranks, on a gloo group that nothing else uses: a thread may wait on it while training continues.

    Constructing it is collective. Every wait ends after `timeout` with an error that names the missing ranks.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def close(self) -> None:
        dist.destroy_process_group(self.group)

    def gather(self) -> None:
        """Waits for all ranks.

        Raises:
            RuntimeError: on rank 0 it names the missing ranks; on others it says that rank 0 is missing or gave up.
        """
        dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)  # it ignores the group's own time-out

    def agree(self, action: Callable[[], R]) -> list[R]:
        """Calls `action` on every rank; returns the results of all ranks. If it fails on one rank, it fails on all.

        Raises:
            ValueError, OSError: if a rank raised that.
            RuntimeError: for all other errors.
        """
        answer: tuple[R | None, Failure | None]
        cause: Exception | None = None
        # A rank whose action failed still takes part in the exchange below, since the others wait for it there.
        try:
            answer = action(), None
        except Exception as error:
            cause, kind = error, next((kind for kind in SHARED_TYPES if isinstance(error, kind)), RuntimeError)
            answer = None, (kind, str(error))
        self.gather()  # names missing ranks, which a timed-out all-gather does not
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer, group=self.group)
        if failures := {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}:
            raise combine_errors(failures) from cause
        return [result for result, _ in answers]

    def on_first(self, action: Callable[[], R]) -> R:
        """Calls `action` on rank 0 alone; returns its result on every rank. Errors as from `agree`."""
        return cast(R, self.agree(lambda: action() if self.rank == 0 else None)[0])


def check_consistent(subject: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError on every rank if ranks differ in one of these values. Collective.

    Args:
        subject: the values as a whole, such as "the configuration", for the message.
    """
    values_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values_by_rank, dict(values))
    for rank, of_rank in enumerate(values_by_rank):
        for name, value in values_by_rank[0].items():
            if of_rank[name] != value:
                both_values = f"{of_rank[name]} on rank {rank} and {value} on rank 0"
                raise ValueError(f"{subject} must be the same on all ranks: {name} is {both_values}")


def combine_errors(failures: dict[int, Failure]) -> Exception:
    """Returns one error for the failures of several ranks."""
    kinds = {kind for kind, _ in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else RuntimeError
    if kind is ValueError:  # usually the same on all ranks
        return ValueError("; ".join(dict.fromkeys(text for _, text in failures.values())))
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items()))


@contextmanager
def convert_dcp_errors() -> Generator[None]:
    """Context manager that turns DCP's error of several ranks, which is no `Exception`, into one as from `agree`."""
    try:
        yield
    except CheckpointException as error:
        raise combine_errors({rank: failure(of_rank) for rank, (of_rank, _) in error.failures.items()}) from error


def failure(error: BaseException) -> Failure:
    kind = next((kind for kind in SHARED_TYPES if isinstance(error, kind)), None)
    return (kind, str(error)) if kind else (RuntimeError, f"{type(error).__name__}: {error}")
