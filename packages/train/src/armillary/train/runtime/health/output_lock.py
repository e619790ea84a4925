"""The lock of an output folder, as all ranks of a run see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from armillary.train.runtime.health.lock import Claim, Holder, LockLost, Refused, take

BEAT, SILENT = 5.0, 30.0
"""Seconds between a holder's signs of life; and without any, after which one on another machine is taken for gone."""


class OutputLock:
    """The lock of an output folder, for all ranks, of which the first has it; a `with` block. Collective.

    Args:
        say: called with a line about what takes time.
        flag: by which the folder was named, for errors.

    Raises (on entry):
        ValueError: another run has it, or the folder cannot be written to; on every rank.
    """

    def __init__(self, output: Path, say: Callable[[str], None], silent: float = SILENT, flag: str = "output") -> None:
        self.output, self.say, self.silent, self.flag = output, say, silent, flag
        self.claim: Claim | None = None
        self.run, self._lost = "", ""
        self._over = threading.Event()

    def __enter__(self) -> Self:
        answers: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(answers, self._take() if dist.get_rank() == 0 else None)
        except BaseException:
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
        """To be called right before the folder is changed: raises `LockLost` where that is no longer this run's right.

        On the first rank, which alone makes such changes; an OSError where the lock cannot be read.
        """
        if self.claim is not None:
            self.claim.check()

    def check(self) -> None:
        """Raises `LockLost` if the loss has been noticed; reads nothing."""
        if self._lost:
            raise LockLost(self._lost)

    def _take(self) -> tuple[str, str]:
        """(the run's name, why it cannot begin)."""
        holder = Holder.this_process()
        try:
            self.claim = take(self.output / "lock", holder, self.silent, self.say)
        except Refused as refusal:
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
                self._lost = "" if self._over.is_set() else str(lost)
                return
            except OSError:
                continue  # a network file system that does not answer just now
