"""The files of a checkpoint, held against what is known of them: sizes and checksums, and a JSON file with its own."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from armillary.core.files import parse_json
from armillary.train.runtime.checkpoint.metadata import Damaged
from armillary.train.runtime.checkpoint.writer import Written, read_back

GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""Errors of a file that is damaged. Others, such as a lack of permission, say nothing about it."""


def file_fault(files: Mapping[str, Written], folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with every `parts`-th file from number `part` on; None: all is as it was written.

    Raises:
        ValueError: a file may not be read.
    """
    for name in sorted(files)[part::parts]:
        try:
            with reading(folder / name):
                found = read_back(folder / name)
        except Damaged as damage:
            return f"file {damage}"
        if found.size != files[name].size:
            return f"file {name} has {found.size} of {files[name].size} bytes"
        if found != files[name]:
            return f"file {name} has other bytes than were written"
    return None


def write_checked(path: Path, fields: Mapping[str, Any]) -> None:
    """Puts fields on disk as JSON, with a checksum of them."""
    with path.open("w") as file:
        file.write(json.dumps({**fields, "crc32": checksum(fields)}, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_checked(path: Path) -> dict[str, Any]:
    """The fields that `write_checked` has written.

    Raises:
        Damaged: there are none, or others.
        ValueError: the file may not be read.
    """
    with reading(path):
        text = path.read_bytes()
    try:
        fields = cast(dict[str, Any], parse_json(text))
        same = fields.pop("crc32") == checksum(fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from error
    if not same:
        raise Damaged(f"{path.name} has other bytes than were written")
    return fields


def checksum(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Tells a file that is damaged from one that may be whole.

    Raises:
        Damaged: there is none, or the disk cannot read it.
        ValueError: it may not be read, for example for lack of permission.
    """
    try:
        yield
    except OSError as error:
        if error.errno in GONE:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
        raise ValueError(
            f"{path} cannot be read ({error.strerror}), though it may be whole; make it readable for every rank, or "
            "move its checkpoint to another folder"
        ) from error
