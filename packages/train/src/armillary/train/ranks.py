"""Actions of all ranks of a run: an action that fails on one rank raises on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch.distributed as dist

R = TypeVar("R")
# An error of one rank as the other ranks raise it: (type, message).
Failure = tuple[type[Exception], str]

# Errors that all ranks raise with the type that they have on one rank; any other becomes a RuntimeError.
SHARED_TYPES = (ValueError, OSError)


class Ranks:
    """All ranks, in a gloo group of their own, so that a thread may wait in it while training continues.

    The constructor is collective. Every wait ends after `timeout`; on rank 0 the error names the missing ranks.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def close(self) -> None:
        dist.destroy_process_group(self.group)

    def on_all(self, action: Callable[[], R]) -> list[R]:
        """Calls `action` on every rank; returns the results of all ranks. If it raises on one rank, all raise.

        Raises ValueError or OSError if all errors are of this type, else RuntimeError; also if ranks are missing.
        """
        return results_of_all(action, self.group, self.timeout)

    def on_first(self, action: Callable[[], R]) -> R:
        """Calls `action` on rank 0 alone; returns the result on every rank. Errors as from `on_all`."""
        return cast(R, self.on_all(lambda: action() if self.rank == 0 else None)[0])


def results_of_all(
    action: Callable[[], R], group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
) -> list[R]:
    """Calls `action` on every rank of a group, as `Ranks.on_all` does; by default of the default group. Collective."""
    answer: tuple[R | None, Failure | None]
    cause: Exception | None = None
    # 1. A rank whose action failed still takes part in the exchange below, since the others wait for it there.
    try:
        answer = action(), None
    except Exception as error:
        kind = next((kind for kind in SHARED_TYPES if isinstance(error, kind)), None)
        failure = (kind, str(error)) if kind else (RuntimeError, f"{type(error).__name__}: {error}")
        cause, answer = error, (None, failure)
    # 2. An all-gather that times out does not name missing ranks. `monitored_barrier` does so on rank 0; on the other
    # ranks it says that rank 0 is missing or gave up. Only gloo has it. Its default time-out is the default group's.
    if timeout is not None:
        dist.monitored_barrier(group, timeout, wait_all_ranks=True)
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, answer, group=group)
    # 3. One error for all failures, with their type if they have one.
    failures: dict[int, Failure] = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
    if not failures:
        return [result for result, _ in answers]
    kinds = {kind for kind, _ in failures.values()}
    if kinds == {ValueError}:  # usually all ranks raise the same one
        raise ValueError("; ".join(dict.fromkeys(text for _, text in failures.values()))) from cause
    kind = kinds.pop() if len(kinds) == 1 else RuntimeError
    raise kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items())) from cause


def check_consistent(subject: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError on every rank if ranks differ in one of these values of the `subject`. Collective."""
    values_by_rank = results_of_all(lambda: dict(values))
    for rank, of_rank in enumerate(values_by_rank):
        for name, value in values_by_rank[0].items():
            if of_rank[name] != value:
                both_values = f"{of_rank[name]} on rank {rank} and {value} on rank 0"
                raise ValueError(f"{subject} must be the same on all ranks: {name} is {both_values}")


def check_shared(folder: Path, ranks: Ranks, flag: str) -> None:
    """Creates the folder if it does not exist, and checks that all ranks see the same folder. Collective.

    Raises on every rank ValueError with the ranks that do not see a file of rank 0 and the `flag` that sets the folder,
    or OSError if rank 0 cannot create a file.
    """

    # Rank 0 creates a file with a name that no earlier run has used. The other ranks look for it in their folder.
    def create_token() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".seen-by-all-{uuid4().hex}"
        (folder / name).touch()
        return name

    token = folder / ranks.on_first(create_token)
    blind_ranks = [rank for rank, sees_it in enumerate(ranks.on_all(token.exists)) if not sees_it]
    ranks.on_first(token.unlink)
    if blind_ranks:
        raise ValueError(
            f"{folder} is not the same folder for all ranks: a file of rank 0 is not seen by rank "
            f"{', '.join(map(str, blind_ranks))}; choose a {flag} on a file system that all hosts share"
        )
