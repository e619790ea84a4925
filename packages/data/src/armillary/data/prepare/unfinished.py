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
        start_over: empty a folder that was begun with another plan.

    Raises:
        ValueError: it was begun with another plan.
    """
    folder = partial_folder(path)
    known = read_plan(folder)
    if known not in (None, plan):
        if not start_over:
            raise ValueError(
                f"{folder} was begun with other settings or input, or an input file has changed since; finish it as it "
                "was begun, or start over with --overwrite"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if known != plan:
        write_file(folder / PROGRESS, json.dumps({"plan": plan, "parts": 0, "counts": {}, "files": {}}).encode())


def read_plan(folder: Path) -> str | None:
    """What the parts in a folder are made from; None if nothing is there. Without a plan, nothing there counts."""
    try:
        return json.loads((folder / PROGRESS).read_text())["plan"]
    except OSError:
        return None


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
