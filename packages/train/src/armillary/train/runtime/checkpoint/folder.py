"""The folder of a run's checkpoints: `step-N` is whole, and whatever a kill can leave has another name.

A checkpoint is written as `step-N.partial-RUN` and renamed when all of it is on disk. One that goes is renamed before
it is removed. One that was found damaged is kept as `step-N.damaged`, until that step is saved anew; one that is of
another step, a copy, as `step-N.copy`, for good.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

COMPLETE, LEFT = re.compile(r"step-(\d+)"), re.compile(r"step-\d+\.partial(-\w*)?|\.seen-by-all-[0-9a-f]{32}")


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints at `path`. One process at a time may change it: rank 0.

    Args:
        run: a name that no other run has.
        fence: called right before a change that others see; raises where another run has taken the folder. That run has
            removed what was unfinished when it took it, so that what comes too late cannot become a checkpoint either.
    """

    path: Path
    run: str = ""
    fence: Callable[[], None] = lambda: None

    def place(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def partial(self, step: int) -> Path:
        return self.path / f"step-{step}.partial-{self.run}"

    def damaged(self, step: int) -> Path:
        return self.path / f"step-{step}.damaged"

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def steps(self) -> list[int]:
        """Of complete checkpoints, in rising order."""
        return sorted(int(match[1]) for name in self.names() if (match := COMPLETE.fullmatch(name)))

    def clear(self) -> None:
        """Removes what other runs have left unfinished, and what was damaged and then saved anew."""
        self.fence()
        for name in filter(LEFT.fullmatch, self.names()):
            remove(self.path / name)
        for step in self.steps():
            remove(self.damaged(step))

    def begin(self, step: int) -> None:
        """Makes room for the files of a checkpoint, in `partial(step)`."""
        self.fence()
        remove(self.partial(step))
        self.partial(step).mkdir(parents=True)

    def complete(self, step: int) -> None:
        """Makes what was written, and is on disk but for its names, a checkpoint."""
        partial = self.partial(step)
        sync_folder(partial)
        self.fence()
        partial.rename(self.place(step))
        sync_folder(self.path)
        with suppress(OSError):  # the checkpoint is whole without that
            remove(self.damaged(step))

    def discard(self, step: int) -> None:
        """Removes what was written of a checkpoint that did not come to its end."""
        remove(self.partial(step))

    def set_aside(self, step: int, copy: bool) -> Path:
        """Gives a checkpoint that is damaged, or a `copy` of another step's, another name; which."""
        self.fence()
        kept = self._copy(step) if copy else self.damaged(step)
        if not copy:
            remove(kept)
        self.place(step).rename(kept)
        return kept

    def _copy(self, step: int) -> Path:
        """A name that is free."""
        names = (f"step-{step}.copy{f'-{number}' if number else ''}" for number in count())
        return next(path for name in names if not (path := self.path / name).exists())

    def prune(self, keep_last: int, keep_every: int | None) -> None:
        """Removes all but the newest `keep_last` and those of steps that `keep_every` divides."""
        self.fence()
        for step in superseded(self.steps(), keep_last, keep_every):
            remove(self.partial(step))
            self.place(step).rename(self.partial(step))
            remove(self.partial(step))


def superseded(steps: list[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Which of these steps, in rising order, need not be kept."""
    return [step for step in steps[:-keep_last] if keep_every is None or step % keep_every]


def remove(path: Path) -> None:
    """Removes a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Sees to it that the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
