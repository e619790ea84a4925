"""The folder of an incomplete store: its progress file, its lock, and its move into place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from armillary.core.files import parse_json
from armillary.data.formats.folder import partial_folder, write_file

PROGRESS, OLDER = "progress.json", "older"


def begin(path: Path, plan: str, start_over: bool) -> None:
    """Creates the folder of an incomplete store, or keeps one with the same plan.

    Args:
        plan: key of the input and settings.
        start_over: discard the parts of another plan. A folder without parts is always reused.

    Raises:
        ValueError: the folder has parts of another plan, or other files.
    """
    folder = partial_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    files = [file for file in folder.iterdir() if not file.name.startswith(PROGRESS)]
    try:
        progress = parse_json((folder / PROGRESS).read_text())
    except FileNotFoundError:
        progress = {"plan": None, "parts": 0}
        if files:
            raise ValueError(
                f"{folder} was not made by `armillary-data prepare`; move it or name another output"
            ) from None
    if progress["plan"] == plan:
        return
    if progress["parts"] and not start_over:
        raise ValueError(
            f"{folder} was started with other settings or input, or an input file has changed since; resume with the "
            "same settings, or start over with --overwrite"
        )
    _write_plan(folder, "")  # a kill during removal must not leave files that belong to any plan
    for file in files:
        file.unlink()
    _write_plan(folder, plan)


def _write_plan(folder: Path, plan: str) -> None:
    write_file(folder / PROGRESS, json.dumps({"plan": plan, "parts": 0, "counts": {}, "files": {}}).encode())


def put_in_place(path: Path) -> None:
    """Moves the complete store to `path`. An older store there is first moved into the new folder, then removed."""
    folder = partial_folder(path)
    if path.exists():
        shutil.rmtree(folder / OLDER, ignore_errors=True)
        path.rename(folder / OLDER)
    folder.rename(path)
    remove_older(path)


def restore_older(path: Path) -> None:
    """Moves the older store back if `put_in_place` was killed between its two moves."""
    if (partial_folder(path) / OLDER).exists() and not path.exists():
        (partial_folder(path) / OLDER).rename(path)


def remove_older(path: Path) -> None:
    """Removes the older store from the new one, and last the progress file, whose absence marks the end."""
    shutil.rmtree(path / OLDER, ignore_errors=True)
    (path / PROGRESS).unlink(missing_ok=True)


@contextmanager
def lock_output(path: Path) -> Generator[None]:
    """Locks the output against other processes. A killed process leaves no lock.

    Raises:
        ValueError: another process prepares the same output.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    try:
        with FileLock(lock, blocking=False):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # a process that has opened it in the meantime sees that it is gone
    except Timeout as error:
        raise ValueError(f"another process is preparing {path}; wait for it, or name another output") from error
