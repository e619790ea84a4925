"""Verifies a checkpoint's files by recorded sizes and checksums; reads and writes JSON files that have a checksum."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from armillary.core.parts import file_size, parse_object, read_file
from armillary.train.checkpoint.reader import Damaged
from armillary.train.checkpoint.writer import FileRecord

DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENXIO, errno.EFBIG)
"""Error numbers of a damaged file. After other errors, such as a lack of permission, the file may be intact."""


def file_fault(files: Mapping[str, FileRecord], folder: Path, reader: int = 0, readers: int = 1) -> str | None:
    """Returns the first fault among a reader's share of the files; None if all are intact.

    Args:
        reader: number of this reader, 0..readers-1.
        readers: number of readers that divide the files among them.

    Raises:
        ValueError: this process may not read a file.
    """
    # Sorted, so that all readers number the files alike and their shares cover each file once.
    for name in sorted(files)[reader::readers]:
        try:
            with reading(folder / name):
                size = file_size(folder / name)
                if size != files[name].size:  # compared before the bytes are read, which may be many
                    return f"file {name} has {size} of {files[name].size} bytes"
                if FileRecord.of_file(folder / name) != files[name]:
                    return f"file {name} has other bytes than were written"
        except Damaged as damage:
            return f"file {damage}"
    return None


def write_checked(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes fields as JSON with their checksum, and flushes the file to disk."""
    with path.open("w") as file:
        file.write(json.dumps({**fields, "crc32": checksum(fields)}, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_checked(path: Path) -> dict[str, Any]:
    """Returns the fields that `write_checked` wrote.

    Raises:
        Damaged: the file is missing or has changed.
        ValueError: this process may not read the file.
    """
    with reading(path):
        text = read_file(path)
    try:
        fields = parse_object(text)
    except ValueError as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from error
    if fields.pop("crc32", None) != checksum(fields):
        raise Damaged(f"{path.name} has other bytes than were written")
    return fields


def checksum(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Context manager that turns an OSError into `Damaged`, or into a ValueError if the file may be intact.

    Raises:
        Damaged: the file is missing, or the disk cannot read it.
        ValueError: the file may be intact, but this process cannot read it, for example for lack of permission.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DAMAGE:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
        raise ValueError(
            f"{path} cannot be read ({error.strerror}), though it may be intact; make it readable for every rank, or "
            "move its checkpoint to another folder"
        ) from error
