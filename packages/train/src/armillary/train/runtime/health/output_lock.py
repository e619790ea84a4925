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
    """Context manager that locks an output folder for all ranks; rank 0 holds the lock. Entering it is collective.

    Args:
        say: called with a line before a wait for another run's heartbeats.
        timeout: seconds without a heartbeat after which a holder on another machine counts as dead.
        flag: the flag that sets the folder, for messages.

    Raises (on entry):
        ValueError: another run holds the lock, or the folder cannot be written to; on every rank.
    """

    def __init__(
        self, output: Path, say: Callable[[str], None], timeout: float = TAKEOVER_TIMEOUT, flag: str = "output"
    ) -> None:
        self.output, self.say, self.timeout, self.flag = output, say, timeout, flag
        self.claim: Claim | None = None  # on rank 0
        self.run = ""  # name of this run
        self._lost_message = ""  # of the LockLost that a heartbeat raised; "" while the lock is held
        self._exited = threading.Event()

    def __enter__(self) -> Self:
        # Every rank gets (run, refusal) from rank 0, so that a refusal raises on all ranks.
        answers: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(answers, self._take() if dist.get_rank() == 0 else None)
        except BaseException:  # also after ^C the lock must be released
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
        self._exited.set()
        if self.claim is not None:
            self.claim.release()

    def fence(self) -> None:
        """Reads the lock; raises LockLost if another run has taken it, and OSError if it cannot be read.

        Call it on rank 0 right before a change that other runs see. Does nothing on other ranks.
        """
        if self.claim is not None:
            self.claim.check()

    def check(self) -> None:
        """Raises LockLost if the latest heartbeat found that another run has taken the lock. Reads no file."""
        if self._lost_message:
            raise LockLost(self._lost_message)

    def _take(self) -> tuple[str, str]:
        """Takes the lock; returns (name of the run, the reason why the run may not start or "")."""
        holder = Holder.this_process()
        try:
            self.claim = take(self.output / "lock", holder, self.timeout, self.say)
        except FolderInUse as refusal:
            return holder.run, str(refusal)
        except OSError as error:
            return holder.run, f"cannot be written to ({error.strerror}: {error.filename}); name another folder"
        return holder.run, ""

    def _beat(self, claim: Claim) -> None:
        """Posts heartbeats until the block exits or another run has taken the lock. Runs in a thread."""
        while not self._exited.wait(BEAT):
            claim.beat()
            try:
                claim.check()
            except LockLost as lost:
                # A lock that this run has just released is not lost.
                self._lost_message = "" if self._exited.is_set() else str(lost)
                return
            except OSError:
                continue  # a network file system may not answer for a while
