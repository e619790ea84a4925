"""What a checkpoint must hold: every file with its size and checksum, and what is known of the run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from pydantic import TypeAdapter, ValidationError

from armillary.core.checkpoint.metadata import Damaged
from armillary.core.checkpoint.writer import Written, read_back
from armillary.core.files import parse_json

MANIFEST = "manifest.json"
FORMAT = 2
"""Higher where older code could not read a checkpoint; new fields alone need no other. 1 had pickles in it."""

GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""Errors of a file that is damaged. Others, such as a lack of permission, say nothing about it."""


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says of itself, as plain JSON.

    Args:
        step: after which it was taken.
        ranks: that took it.
        tokens: trained on until then, over all ranks.
        loader: state of the training rows, the same on all ranks.
        model: fields of a Hugging Face config.json.
        time: when it was complete, ISO 8601 in UTC.
        files: by name.
        settings: of the run, by their flags, as they are shown.
    """

    step: int
    ranks: int
    tokens: int
    loader: dict[str, Any]
    model: dict[str, Any]
    time: str
    files: dict[str, Written]
    settings: dict[str, str] = field(default_factory=dict[str, str])

    def write(self, folder: Path) -> None:
        """Puts it on disk."""
        fields = {"format": FORMAT, **asdict(self)}
        with (folder / MANIFEST).open("w") as file:
            file.write(json.dumps({**fields, "crc32": checksum(fields)}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint. Fields that this version does not know are passed over.

        Raises:
            Damaged: there is none, or it has been changed, or holds something else.
            ValueError: it has a newer format, or may not be read.
        """
        with reading(folder / MANIFEST):
            text = (folder / MANIFEST).read_bytes()
        fields = intact(text)
        found = fields.get("format")
        if type(found) is not int:
            raise Damaged(f"{MANIFEST} has no format, but {found!r}")
        if found > FORMAT:
            raise ValueError(f"{folder} has format {found}; this version of armillary-train reads formats to {FORMAT}")
        try:
            manifest = MANIFESTS.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise Damaged(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if stray := [name for name in manifest.files if Path(name).name != name]:
            raise Damaged(f"{MANIFEST} names {stray[0]!r}, which is no file of a checkpoint")
        return manifest

    def fault(self, folder: Path, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with every `parts`-th file from number `part` on; None: all is as it was written.

        Raises:
            ValueError: a file may not be read.
        """
        for name in sorted(self.files)[part::parts]:
            try:
                with reading(folder / name):
                    found = read_back(folder / name)
            except Damaged as damage:
                return f"file {damage}"
            if found.size != self.files[name].size:
                return f"file {name} has {found.size} of {self.files[name].size} bytes"
            if found != self.files[name]:
                return f"file {name} has other bytes than were written"
        return None


MANIFESTS = TypeAdapter(Manifest)


def intact(text: bytes) -> dict[str, Any]:
    """The fields of a manifest, without the checksum that they have.

    Raises:
        Damaged: they have another.
    """
    try:
        fields = cast(dict[str, Any], parse_json(text))
        same = fields.pop("crc32") == checksum(fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error})") from error
    if not same:
        raise Damaged(f"{MANIFEST} has other bytes than were written")
    return fields


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


def checksum(fields: dict[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())
