"""The output folder of a run, and its folder of checkpoints.

A folder named `step-N` is always complete, even after a kill:

step-N.partial-RUN  a checkpoint that is written or deleted; renamed to step-N once all files are on disk
step-N              a complete checkpoint
step-N.damaged      a damaged checkpoint; kept until step N is saved again
step-N.copy         a copy of another step's folder, found under the name step-N
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from armillary.core.internal import write_whole
from armillary.train.config.sections import Config

COMPLETE = re.compile(r"step-(\d+)")
# Matches names that a killed run leaves: incomplete checkpoints, and the file that `check_shared` creates.
INCOMPLETE = re.compile(r"step-\d+\.partial(-\w*)?|\.seen-by-all-[0-9a-f]{32}")


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints at `path`. Only rank 0 of the run that holds the output folder's lock may change them.

    Args:
        run: a name that no other run has.
        fence: called right before a change that others see; raises if another run has taken the folder.
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
        return sorted(int(match[1]) for name in self.names() if (match := COMPLETE.fullmatch(name)))

    def clear(self) -> None:
        """Removes all incomplete checkpoints, and damaged ones of steps that were saved again since."""
        self.fence()
        for name in filter(INCOMPLETE.fullmatch, self.names()):
            remove(self.path / name)
        for step in self.steps():
            remove(self.damaged_path(step))

    def begin(self, step: int) -> None:
        self.fence()
        remove(self.partial(step))
        self.partial(step).mkdir(parents=True)

    def complete(self, step: int) -> None:
        """Commits a checkpoint whose files are on disk, by renaming its folder."""
        partial = self.partial(step)
        sync_folder(partial)  # all file names are on disk before the folder gets the name of a complete checkpoint
        # If another run takes the folder now, the rename fails, since that run removes all incomplete checkpoints.
        self.fence()
        partial.rename(self.path_of(step))
        sync_folder(self.path)  # before the caller removes older checkpoints
        with suppress(OSError):  # the checkpoint is complete, with or without the damaged one
            remove(self.damaged_path(step))

    def set_aside(self, step: int, copy: bool) -> Path:
        """Renames a checkpoint that is damaged, or a `copy` of another step; returns the new path."""
        self.fence()
        if copy:
            # A copy gets a new name, because it may be the last intact checkpoint of the step that it was copied from.
            # A damaged checkpoint replaces an earlier damaged one of its step.
            names = (f"step-{step}.copy{f'-{number}' if number else ''}" for number in count())
            path = next(path for name in names if not (path := self.path / name).exists())
        else:
            path = self.damaged_path(step)
            remove(path)
        self.path_of(step).rename(path)
        return path

    def prune(self, keep_last: int, keep_every: int | None) -> None:
        """Keeps the newest `keep_last` checkpoints and those of multiples of `keep_every` steps; removes the others."""
        self.fence()
        for step in self.steps()[:-keep_last]:
            if keep_every is None or step % keep_every:
                # Renamed first, because a kill during the deletion must not leave an incomplete step-N.
                remove(self.partial(step))
                self.path_of(step).rename(self.partial(step))
                remove(self.partial(step))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- the output folder -------------------------------------------------------------------------------------------------


def checkpoint_folder(config: Config) -> CheckpointFolder:
    return CheckpointFolder(config.train.output / "checkpoint")


def check_output(config: Config) -> None:
    """Creates the output folder if it does not exist, and changes nothing in it.

    Raises ValueError, on the ranks that see it, if the folder cannot be written to, or has checkpoints although
    `save.resume` is "never".
    """
    with writing_to(config.train.output) as folder:
        if config.save.resume == "never" and (steps := checkpoint_folder(config).steps()):
            path = checkpoint_folder(config).path_of(steps[-1])
            raise ValueError(f"--save.resume never: {path} exists; name another --train.output")
        folder.mkdir(parents=True, exist_ok=True)
        # Creates a file, because permission bits do not tell whether a network file system accepts one.
        TemporaryFile(dir=folder).close()


def write_config(config: Config) -> None:
    with writing_to(config.train.output) as folder:
        # Paths are absolute, so that other commands find the data from any working directory.
        text = json.dumps(asdict(config), indent=2, default=lambda path: str(path.absolute())) + "\n"
        write_whole(folder / "config.json", lambda partial: partial.write_text(text))


@contextmanager
def writing_to(folder: Path) -> Generator[Path]:
    try:
        yield folder
    except OSError as error:
        raise ValueError(
            f"--train.output {folder}: cannot be written to ({error.strerror}); name another folder"
        ) from error
