"""The output folder of a run, and its configuration there."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile

from armillary.core.parts import write_whole
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.config.sections import Config


def checkpoint_folder(config: Config) -> CheckpointFolder:
    return CheckpointFolder(config.train.output / "checkpoint")


def check_output(config: Config) -> None:
    """Creates the output folder if it does not exist, and changes nothing in it.

    Raises:
        ValueError: the folder cannot be written to, or has checkpoints although `save.resume` is "never". Only on the
            ranks that see this.
    """
    with writing_to(config.train.output) as folder:
        if config.save.resume == "never" and (steps := checkpoint_folder(config).steps()):
            path = checkpoint_folder(config).path_of(steps[-1])
            raise ValueError(f"--save.resume never: {path} exists; name another --train.output")
        folder.mkdir(parents=True, exist_ok=True)
        # Creates a file, because permission bits do not tell whether a network file system accepts one.
        TemporaryFile(dir=folder).close()


def write_config(config: Config) -> None:
    """Writes the resolved configuration to config.json in the output folder. On one rank.

    Raises:
        ValueError: the file cannot be written.
    """
    with writing_to(config.train.output) as folder:
        # Paths are absolute, so that other commands find the data from any working directory.
        text = json.dumps(asdict(config), indent=2, default=lambda path: str(path.absolute())) + "\n"
        write_whole(folder / "config.json", lambda partial: partial.write_text(text))


@contextmanager
def writing_to(folder: Path) -> Generator[Path]:
    """Turns an OSError into a ValueError that names --train.output."""
    try:
        yield folder
    except OSError as error:
        raise ValueError(
            f"--train.output {folder}: cannot be written to ({error.strerror}); name another folder"
        ) from error
