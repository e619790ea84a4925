"""Files: reading that cannot hang, parsers that raise only ValueError, OSErrors with file names, and atomic writes."""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

MAX_BYTES = 2**28
"""Default limit of `read_file`: more bytes than the largest settings, index or tokenizer has."""


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading, in binary. Files that others may have written are opened only by this function.

    Raises:
        OSError: the file cannot be opened, or is a FIFO, which would block, or a device, which may have no end.
    """
    # Without O_NONBLOCK, opening a FIFO waits for its writer. The open file is examined, since a path may be replaced.
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115, since the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENXIO, "it is not a regular file", str(path))
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def file_size(path: str | os.PathLike[str]) -> int:
    """Returns the size of a regular file; to be called before a library opens the file by its path."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_size


def read_file(path: str | os.PathLike[str], max_bytes: int | None = MAX_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: as `open_file`, or the file has more than `max_bytes`; no byte is read then.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {max_bytes:,} are read", str(path))
        return file.read(size)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError, which names the file, if there is none."""
    try:
        return parse_object(read_file(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path}: {reason}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    value: object = parse_json(text)
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise ValueError(f"it must be a JSON object, not {kind}")
    return cast(dict[str, Any], value)


def parse_json(text: str | bytes) -> Any:
    # Decoded here, since `json.loads` would guess the encoding of bytes. Some editors write a byte order mark.
    return _parse_nested(json.loads, text.decode("utf-8-sig") if isinstance(text, bytes) else text)


def parse_toml(text: str | bytes) -> dict[str, Any]:
    return _parse_nested(tomllib.loads, text.decode() if isinstance(text, bytes) else text)


def _parse_nested(parser: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parser(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def is_file_name(name: object) -> TypeGuard[str]:
    """Returns True if `name` is the name of a file in a folder; False for "..", "a/b" and values that are not text."""
    return isinstance(name, str) and name not in ("", "..") and "\0" not in name and Path(name).name == name


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Context manager that adds `path` to an OSError that has no file name, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes a file and flushes it to disk, so that it is complete once it is renamed, even after a crash."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Replaces `path` by the file that `write` makes: it has the old or the new content, never a part of it."""
    # `write` gets the path of a temporary file beside it, which is then renamed.
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        write(partial)
        return partial.replace(path)
