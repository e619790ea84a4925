"""What a checkpoint must hold: every file with its size and checksum, and what is known of the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from armillary.core.files import is_file_name
from armillary.train.runtime.checkpoint.files import file_fault, read_checked, write_checked
from armillary.train.runtime.checkpoint.folder import CheckpointFolder
from armillary.train.runtime.checkpoint.metadata import Damaged
from armillary.train.runtime.checkpoint.writer import Written

MANIFEST = "manifest.json"
FORMAT = 2
"""Higher where older code could not read a checkpoint; new fields alone need no other. 1 had pickles in it."""


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
        write_checked(folder / MANIFEST, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint. Fields that this version does not know are passed over.

        Raises:
            Damaged: there is none, or it has been changed, or holds something else.
            ValueError: it has a newer format, or may not be read.
        """
        fields = read_checked(folder / MANIFEST)
        found = fields.get("format")
        if type(found) is not int:
            raise Damaged(f"{MANIFEST} has no format, but {found!r}")
        if found > FORMAT:
            raise ValueError(f"{folder} has format {found}; this version of armillary-train reads formats to {FORMAT}")
        try:
            manifest = MANIFESTS.validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise Damaged(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        for name in manifest.files:
            if not is_file_name(name):
                raise Damaged(f"{MANIFEST}: files: {name!r} is no file name")
        return manifest


MANIFESTS = TypeAdapter(Manifest)


def fault(folder: CheckpointFolder, step: int, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint's manifest, or with this part of its files; errors as from `Manifest`."""
    try:
        manifest = Manifest.read(folder.place(step))
    except Damaged as damage:
        return str(damage)
    if manifest.step != step:
        return f"{MANIFEST} is that of step {manifest.step}"
    return file_fault(manifest.files, folder.place(step), part, parts)


def is_copy(folder: CheckpointFolder, step: int) -> bool:
    """Whether what has this step's name says that it is of another step."""
    try:
        return Manifest.read(folder.place(step)).step != step
    except Damaged:
        return False
