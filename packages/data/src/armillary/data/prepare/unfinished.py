"""The folder of a store in the making: which input and settings it is of, and that only one process is at it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from armillary.data.formats.folder import write_file

PROGRESS = "progress.json"


def partial_folder(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def begin(path: Path, plan: str, start_over: bool) -> None:
    """Makes the folder of a store in the making, or leaves one of the same plan as it is.

    Args:
        start_over: empty a folder that has parts of another plan. One without any is emptied in either case.

    Raises:
        ValueError: it has parts of another plan, or is no such folder.
    """
    folder = partial_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    others = [file for file in folder.iterdir() if not file.name.startswith(PROGRESS)]
    known, parts = _plan_and_parts(folder)
    if known is None and others:
        raise ValueError(f"{folder} is in the way, and not of `armillary-data prepare`; move it or name another output")
    if known == plan:
        return
    if parts and not start_over:
        raise ValueError(
            f"{folder} was begun with other settings or input, or an input file has changed since; finish it as it "
            "was begun, or start over with --overwrite"
        )
    _write_plan(folder, "")  # a kill while files are removed must not leave some of them to any plan
    for file in others:
        file.unlink()
    _write_plan(folder, plan)


def _plan_and_parts(folder: Path) -> tuple[str | None, int]:
    """What the parts in a folder are made from, and how many there are; no plan if `begin` was not here."""
    try:
        progress = json.loads((folder / PROGRESS).read_text())
    except FileNotFoundError:
        return None, 0
    return progress["plan"], progress["parts"]


def _write_plan(folder: Path, plan: str) -> None:
    write_file(folder / PROGRESS, json.dumps({"plan": plan, "parts": 0, "counts": {}, "files": {}}).encode())


def clear_older(path: Path) -> None:
    """What is left to do when a store has come to its place: removes the one that was there before."""
    remove(older(path))
    (path / PROGRESS).unlink(missing_ok=True)  # last, as a sign that all is done


def older(path: Path) -> Path:
    return path.with_name(path.name + ".older")


def remove(path: Path) -> None:
    """A folder, a file, a link, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Keeps other processes from making a store at `path` at the same time; no lock is left by those that are killed.

    Raises:
        ValueError: another process is at it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    try:
        with FileLock(lock, blocking=False):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # who opened this very file meanwhile sees that it is gone
    except Timeout as error:
        raise ValueError(f"another process is preparing {path}; wait for it, or name another output") from error
