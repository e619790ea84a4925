"""The folder of a run's checkpoints: `step-N` is whole, and whatever a kill can leave has another name.

A checkpoint is written as `step-N.partial` and renamed when all of it is on disk. One that goes is renamed before it is
removed. One that was found damaged is kept as `step-N.damaged`, until that step is saved anew.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from armillary.train.checkpoint.manifest import Damaged, Manifest

COMPLETE, LEFT = re.compile(r"step-(\d+)"), re.compile(r"step-\d+\.partial|\.seen-by-all-[0-9a-f]{32}")


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints at `path`. One process at a time may change it: rank 0."""

    path: Path

    def place(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def partial(self, step: int) -> Path:
        return self.path / f"step-{step}.partial"

    def damaged(self, step: int) -> Path:
        return self.path / f"step-{step}.damaged"

    def names(self) -> list[str]:
        return os.listdir(self.path) if self.path.is_dir() else []

    def steps(self) -> list[int]:
        """Of complete checkpoints, in rising order."""
        return sorted(int(match[1]) for name in self.names() if (match := COMPLETE.fullmatch(name)))

    def fault(self, step: int, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with the manifest, or with this part of the files; see `Manifest.fault`."""
        try:
            return Manifest.read(self.place(step)).fault(self.place(step), part, parts)
        except Damaged as damage:
            return str(damage)

    def clear(self) -> None:
        """Removes what killed runs have left unfinished, and what was damaged and then saved anew."""
        for name in filter(LEFT.fullmatch, self.names()):
            remove(self.path / name)
        for step in self.steps():
            remove(self.damaged(step))

    def begin(self, step: int) -> None:
        """Makes room for the files of a checkpoint, in `partial(step)`."""
        remove(self.partial(step))
        self.partial(step).mkdir(parents=True)

    def complete(self, manifest: Manifest) -> None:
        """Makes what was written, and is on disk but for its names, a checkpoint."""
        partial = self.partial(manifest.step)
        manifest.write(partial)
        sync_folder(partial)
        partial.rename(self.place(manifest.step))
        sync_folder(self.path)
        with suppress(OSError):  # the checkpoint is whole without that
            remove(self.damaged(manifest.step))

    def discard(self, step: int) -> None:
        """Removes what was written of a checkpoint that did not come to its end."""
        remove(self.partial(step))

    def set_aside(self, step: int) -> None:
        """Gives a damaged checkpoint another name."""
        remove(self.damaged(step))
        self.place(step).rename(self.damaged(step))

    def prune(self, keep_last: int, keep_every: int | None) -> None:
        """Removes all but the newest `keep_last` and those of steps that `keep_every` divides."""
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
