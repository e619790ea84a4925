"""All ranks together, on a process group of their own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

R = TypeVar("R")
Failure = tuple[type[Exception], str]

SHOWN = (ValueError, OSError)
"""Errors that come as themselves on ranks that did not have them; others come as a RuntimeError."""


class Ranks:
    """All ranks, on a gloo group that nothing else uses: a thread may wait on it while training goes on.

    Made by all ranks together. Every wait ends after `timeout` with an error that names who is missing.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def close(self) -> None:
        dist.destroy_process_group(self.group)

    def gather(self) -> None:
        """Waits until all ranks are here.

        Raises:
            RuntimeError: names those that are not, on rank 0; on others, that it is rank 0 or that it has given up.
        """
        dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)  # the group's own is not taken

    def agree(self, action: Callable[[], R]) -> list[R]:
        """What `action` came to on each rank, by rank. Where it fails on one, it fails on all.

        Raises:
            ValueError, OSError: as on the ranks where it was raised.
            RuntimeError: for all other errors.
        """
        mine: tuple[R | None, Failure | None]
        cause: Exception | None = None
        try:
            mine = action(), None
        except Exception as error:
            cause, kind = error, next((kind for kind in SHOWN if isinstance(error, kind)), RuntimeError)
            mine = None, (kind, str(error))
        self.gather()
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, mine, group=self.group)
        if failures := {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}:
            raise combined(failures) from cause
        return [answer for answer, _ in answers]

    def on_first(self, action: Callable[[], R]) -> R:
        """What `action` came to on rank 0, where alone it is done. Errors as from `agree`."""
        return cast(R, self.agree(lambda: action() if self.rank == 0 else None)[0])


def check_consistent(what: str, mine: Mapping[str, Any]) -> None:
    """Refuses ranks that differ in one of these values. Collective.

    Raises:
        ValueError: `what` differs, where, and on which rank; on every rank.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(mine))
    for rank, other in enumerate(found):
        for name, value in found[0].items():
            if other[name] != value:
                both = f"{other[name]} on rank {rank} and {value} on rank 0"
                raise ValueError(f"{what} must be the same on all ranks: {name} is {both}")


def combined(failures: dict[int, Failure]) -> Exception:
    """One error for those of several ranks."""
    kinds = {kind for kind, _ in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else RuntimeError
    if kind is ValueError:  # mostly the same on all
        return ValueError("; ".join(dict.fromkeys(text for _, text in failures.values())))
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items()))


@contextmanager
def errors_as_ours() -> Generator[None]:
    """DCP's error of several ranks, which is no `Exception`, as one that is."""
    try:
        yield
    except CheckpointException as error:
        raise combined({rank: failure(found) for rank, (found, _) in error.failures.items()}) from error


def failure(error: BaseException) -> Failure:
    kind = next((kind for kind in SHOWN if isinstance(error, kind)), None)
    return (kind, str(error)) if kind else (RuntimeError, f"{type(error).__name__}: {error}")
