"""The folder of an incomplete store: its progress file, its lock, and its move to the output path.

Steps of a preparation at `path`, each of which may be interrupted by a kill:

1. `begin` creates `path.partial` with a progress file.
2. `StoreWriter` appends parts to the files in `path.partial`.
3. `put_in_place` moves a store that exists at `path` into `path.partial/older`, then `path.partial` to `path`.
4. `remove_replaced` removes `path/older`, and last the progress file; after a kill, a run with the same key does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from armillary.core.files import read_json
from armillary.core.validation import count
from armillary.data.formats.folder import PREPARATION_KEY, partial_folder, write_file

PROGRESS = "progress.json"
REPLACED = "older"
"""Subfolder for the store that a new store replaces."""


def begin(path: Path, key: str, start_over: bool) -> None:
    """Creates the folder of an incomplete store. An existing one is kept for the same key and emptied for another.

    Args:
        key: hash of the input and settings.
        start_over: True also empties a folder that has parts of a preparation with another key.

    Raises:
        ValueError: the folder has parts of a preparation with another key, or files but no progress file.
    """
    folder = partial_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    # Without the progress file, and its `.new` that a killed `write_file` leaves.
    files = [file for file in folder.iterdir() if not file.name.startswith(PROGRESS)]
    is_begun = (folder / PROGRESS).exists()
    if files and not is_begun:
        raise ValueError(f"{folder} was not made by `armillary-data prepare`; move it or name another output")
    progress = read_progress(folder) if is_begun else {PREPARATION_KEY: None, "parts": 0}
    if progress.get(PREPARATION_KEY) == key:
        return
    if progress["parts"] and not start_over:
        raise ValueError(
            f"{folder} was started with other settings or input, or an input file has changed since; resume with the "
            "same settings, or start over with --overwrite"
        )
    # First an empty key, which no preparation has: after a kill during the removal, the next run starts over.
    _write_progress(folder, "")
    for file in files:
        file.unlink()
    _write_progress(folder, key)


def read_progress(folder: Path) -> dict[str, Any]:
    """Returns the fields of a progress file: key of the preparation; parts, counts and files so far.

    Raises:
        ValueError: the file cannot be read, or a number in it is not a count.
    """
    progress = read_json(folder / PROGRESS)
    try:
        sizes = {f"files.{name}": size for name, (size, _) in progress["files"].items()}
        for name, value in {"parts": progress["parts"], **sizes}.items():
            count(name, value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / PROGRESS} is broken ({error}); remove {folder} and start again") from error
    return progress


def _write_progress(folder: Path, key: str) -> None:
    """Writes the progress of a preparation without parts."""
    progress = {PREPARATION_KEY: key, "parts": 0, "counts": {}, "files": {}}
    write_file(folder / PROGRESS, json.dumps(progress).encode())


def put_in_place(path: Path) -> None:
    """Moves the complete store to `path`, and removes the store that it replaces there."""
    folder = partial_folder(path)
    # A rename cannot replace a folder that has files: the store at `path` is moved away first.
    if path.exists():
        shutil.rmtree(folder / REPLACED, ignore_errors=True)
        path.rename(folder / REPLACED)
    folder.rename(path)
    remove_replaced(path)


def restore_replaced(path: Path) -> None:
    """Moves the replaced store back to `path` if `put_in_place` was killed between its two moves."""
    if (partial_folder(path) / REPLACED).exists() and not path.exists():
        (partial_folder(path) / REPLACED).rename(path)


def remove_replaced(path: Path) -> None:
    """Removes the replaced store from the folder of the new one, and last the progress file."""
    shutil.rmtree(path / REPLACED, ignore_errors=True)
    (path / PROGRESS).unlink(missing_ok=True)


@contextmanager
def lock_output(path: Path) -> Generator[None]:
    """Locks the output against other processes. If a process is killed, the system releases its lock.

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
                # Removed while it is still locked: a process that has opened this file already cannot lock it
                # afterwards, because filelock refuses a lock on a file without a name.
                lock.unlink(missing_ok=True)
    except Timeout as error:
        raise ValueError(f"another process is preparing {path}; wait for it, or name another output") from error
