"""What a checkpoint must hold: every file with its size and checksum, and what is known of the run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from zlib import crc32

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 2**24


class Damaged(Exception):
    """A checkpoint does not hold what was written; says what differs."""


@dataclass(frozen=True)
class Written:
    """A file as it was written: bytes, and CRC-32 of them."""

    size: int
    crc32: int


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
    """

    step: int
    ranks: int
    tokens: int
    loader: dict[str, Any]
    model: dict[str, Any]
    time: str
    files: dict[str, Written]

    def write(self, folder: Path) -> None:
        """Puts it on disk."""
        fields = {"format": FORMAT, **asdict(self)}
        with (folder / MANIFEST).open("w") as file:
            file.write(json.dumps({**fields, "crc32": checksum(fields)}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            Damaged: there is none, or it has been changed.
            ValueError: it has another format.
        """
        try:
            fields = cast(dict[str, Any], json.loads((folder / MANIFEST).read_text()))
            intact = fields.pop("crc32") == checksum(fields)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise Damaged(f"{MANIFEST} cannot be read ({error})") from error
        if not intact:
            raise Damaged(f"{MANIFEST} has other bytes than were written")
        if (found := fields.pop("format")) != FORMAT:
            raise ValueError(f"{folder} has format {found}; this version of armillary-train reads format {FORMAT}")
        files = {name: Written(**file) for name, file in fields.pop("files").items()}
        return cls(**fields, files=files)

    def fault(self, folder: Path, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with every `parts`-th file from number `part` on; None: all is as it was written."""
        for name in sorted(self.files)[part::parts]:
            try:
                found = read_back(folder / name)
            except OSError as error:
                return f"file {name} cannot be read ({error.strerror})"
            if found.size != self.files[name].size:
                return f"file {name} has {found.size} of {self.files[name].size} bytes"
            if found != self.files[name]:
                return f"file {name} has other bytes than were written"
        return None


def checksum(fields: dict[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


def read_back(path: Path) -> Written:
    """Size and checksum of what is there."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), crc32(chunk, crc)
    return Written(size, crc)
