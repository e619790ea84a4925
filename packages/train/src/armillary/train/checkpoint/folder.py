"""The folder of a run's checkpoints: a folder `step-N` is always complete, even after a kill.

step-N.partial-RUN  being written, or being deleted; renamed to step-N once all files are on disk
step-N              complete
step-N.damaged      failed its checksums; kept until step N is saved again
step-N.copy         a copy of another step's folder
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

COMPLETE = re.compile(r"step-(\d+)")
INCOMPLETE = re.compile(r"step-\d+\.partial(-\w*)?|\.seen-by-all-[0-9a-f]{32}")


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints at `path`. One process at a time may change it: rank 0.

    Args:
        run: a name that no other run has.
        fence: called right before a change that others see; raises if another run has taken the folder. A rename after
            that fails too, because the other run has removed all incomplete checkpoints.
    """

    path: Path
    run: str = ""
    fence: Callable[[], None] = lambda: None

    def path_of(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def partial(self, step: int) -> Path:
        return self.path / f"step-{step}.partial-{self.run}"

    def damaged_path(self, step: int) -> Path:
        return self.path / f"step-{step}.damaged"

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, in rising order."""
        return sorted(int(match[1]) for name in self.names() if (match := COMPLETE.fullmatch(name)))

    def clear(self) -> None:
        """Removes incomplete checkpoints of other runs, and damaged checkpoints of steps that were saved again."""
        self.fence()
        for name in filter(INCOMPLETE.fullmatch, self.names()):
            remove(self.path / name)
        for step in self.steps():
            remove(self.damaged_path(step))

    def begin(self, step: int) -> None:
        """Creates `partial(step)`, an empty folder for the files of a checkpoint."""
        self.fence()
        remove(self.partial(step))
        self.partial(step).mkdir(parents=True)

    def complete(self, step: int) -> None:
        """Commits a checkpoint whose files are on disk, by renaming its folder."""
        partial = self.partial(step)
        sync_folder(partial)  # all file names are on disk before the folder gets the name of a complete checkpoint
        self.fence()
        partial.rename(self.path_of(step))
        sync_folder(self.path)  # before the caller removes older checkpoints
        with suppress(OSError):  # the checkpoint is complete without that
            remove(self.damaged_path(step))

    def discard(self, step: int) -> None:
        """Removes an incomplete checkpoint."""
        remove(self.partial(step))

    def set_aside(self, step: int, copy: bool) -> Path:
        """Renames a checkpoint that is damaged, or a `copy` of another step; returns the new path."""
        self.fence()
        if copy:
            # Copies get numbers, because each may be the only one of its step. Damaged ones replace each other.
            names = (f"step-{step}.copy{f'-{number}' if number else ''}" for number in count())
            path = next(path for name in names if not (path := self.path / name).exists())
        else:
            path = self.damaged_path(step)
            remove(path)
        self.path_of(step).rename(path)
        return path

    def prune(self, keep_last: int, keep_every: int | None) -> None:
        """Removes all checkpoints except the newest `keep_last` and those whose step `keep_every` divides."""
        self.fence()
        for step in steps_to_delete(self.steps(), keep_last, keep_every):
            # Renamed before it is deleted: a kill in between must not leave an incomplete step-N.
            remove(self.partial(step))
            self.path_of(step).rename(self.partial(step))
            remove(self.partial(step))


def steps_to_delete(steps: list[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Returns those of `steps`, in rising order, that retention does not keep."""
    return [step for step in steps[:-keep_last] if keep_every is None or step % keep_every]


def remove(path: Path) -> None:
    """Removes a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
