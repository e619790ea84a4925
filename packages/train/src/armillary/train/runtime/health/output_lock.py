"""The lock of an output folder for all ranks of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from armillary.train.runtime.health.lock import Claim, FolderInUse, Holder, LockLost, take

BEAT = 5.0
"""Seconds between heartbeats of a holder."""

TAKEOVER_TIMEOUT = 30.0
"""Seconds without a heartbeat after which a holder on another machine counts as dead."""


class OutputLock:
    """Context manager that locks an output folder for all ranks; the first rank holds the lock. Collective.

    Args:
        say: called with a line about a wait.
        flag: the setting of the folder, for messages.

    Raises (on entry):
        ValueError: another run holds it, or the folder cannot be written to; on every rank.
    """

    def __init__(
        self, output: Path, say: Callable[[str], None], timeout: float = TAKEOVER_TIMEOUT, flag: str = "output"
    ) -> None:
        self.output, self.say, self.timeout, self.flag = output, say, timeout, flag
        self.claim: Claim | None = None
        self.run, self._lost = "", ""
        self._over = threading.Event()

    def __enter__(self) -> Self:
        # Every rank gets rank 0's answer, so that a refusal raises on all of them.
        answers: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(answers, self._take() if dist.get_rank() == 0 else None)
        except BaseException:  # also an interrupt: the lock must not stay behind
            self.__exit__(None, None, None)
            raise
        self.run, refusal = answers[0]
        if refusal:
            raise ValueError(f"{self.flag} {self.output}: {refusal}")
        if self.claim is not None:
            threading.Thread(target=self._beat, args=(self.claim,), name="output lock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self.claim is not None:
            self.claim.release()

    def fence(self) -> None:
        """Raises LockLost if this run has lost the folder, and OSError if the lock cannot be read.

        Call it right before a change of the folder, on the first rank, the only one that changes it.
        """
        if self.claim is not None:
            self.claim.check()

    def check(self) -> None:
        """Raises LockLost if a heartbeat has noticed the loss; reads nothing."""
        if self._lost:
            raise LockLost(self._lost)

    def _take(self) -> tuple[str, str]:
        """Returns the run's name and the reason why it may not start, "" if it may."""
        holder = Holder.this_process()
        try:
            self.claim = take(self.output / "lock", holder, self.timeout, self.say)
        except FolderInUse as refusal:
            return holder.run, str(refusal)
        except OSError as error:
            return holder.run, f"cannot be written to ({error.strerror}: {error.filename}); name another folder"
        return holder.run, ""

    def _beat(self, claim: Claim) -> None:
        while not self._over.wait(BEAT):
            claim.beat()
            try:
                claim.check()
            except LockLost as lost:
                self._lost = "" if self._over.is_set() else str(lost)  # a lock that was just released is not lost
                return
            except OSError:
                continue  # a network file system may not answer for a while
