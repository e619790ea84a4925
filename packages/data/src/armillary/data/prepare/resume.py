"""The folder of a store in the making: which input and settings it is of, and that only one process is at it."""

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
        progress = parse_json((folder / PROGRESS).read_text())
    except FileNotFoundError:
        return None, 0
    return progress["plan"], progress["parts"]


def _write_plan(folder: Path, plan: str) -> None:
    write_file(folder / PROGRESS, json.dumps({"plan": plan, "parts": 0, "counts": {}, "files": {}}).encode())


def put_in_place(path: Path) -> None:
    """Moves the folder to `path`. A store that was there is in the new one for a moment, so nobody else's file is."""
    folder = partial_folder(path)
    if path.exists():
        shutil.rmtree(folder / OLDER, ignore_errors=True)
        path.rename(folder / OLDER)
    folder.rename(path)
    clear_older(path)


def put_back(path: Path) -> None:
    """Undoes the first half of `put_in_place`, if a kill came before the other one."""
    if (partial_folder(path) / OLDER).exists() and not path.exists():
        (partial_folder(path) / OLDER).rename(path)


def clear_older(path: Path) -> None:
    """What is left to do when a store has come to its place: removes the one that was there before."""
    shutil.rmtree(path / OLDER, ignore_errors=True)
    (path / PROGRESS).unlink(missing_ok=True)  # last, as a sign that all is done


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
