"""The manifest of a checkpoint: its files with sizes and checksums, and the state of the run apart from tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from armillary.core.parts import MAX_COUNT, is_file_name
from armillary.train.checkpoint.files import file_fault, read_checked, write_checked
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.reader import Damaged
from armillary.train.checkpoint.writer import FileRecord

MANIFEST = "manifest.json"
FORMAT = 3
"""Version of the format, increased when older code cannot read new checkpoints. Formats 1 and 2 had pickles."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


@dataclass(frozen=True)
class Manifest:
    """The state of a checkpoint apart from tensors, as plain JSON.

    Args:
        step: the last trained step.
        ranks: number of ranks that saved the checkpoint.
        tokens: number of tokens trained on so far, over all ranks.
        loader: state of the training rows, the same on all ranks.
        model: fields of a Hugging Face config.json.
        time: time of the commit, ISO 8601 in UTC.
        files: size and CRC-32 of each file, by name.
        settings: values of the run's configuration as texts, by flag without leading dashes: "optimizer.min-lr".
    """

    step: Count
    ranks: Annotated[Count, Field(ge=1)]
    tokens: Count
    loader: dict[str, Any]
    model: dict[str, Any]
    time: str
    files: dict[str, FileRecord]
    settings: dict[str, str] = field(default_factory=dict[str, str])

    def write(self, folder: Path) -> None:
        write_checked(folder / MANIFEST, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint. Unknown fields, of later versions, are ignored.

        Raises:
            Damaged: the manifest is missing, has changed, or a field is missing or invalid.
            ValueError: the manifest has another format, or this process cannot read it.
        """
        fields = read_checked(folder / MANIFEST)
        version = fields.get("format")
        if type(version) is not int:  # `isinstance` would take True for 1
            raise Damaged(f"{MANIFEST}: format: {version!r} is not an integer")
        if version > FORMAT:
            raise ValueError(f"{folder} has format {version}; this version of armillary-train reads format {FORMAT}")
        if version < FORMAT:
            raise ValueError(
                f"{folder} has format {version}, and this version of armillary-train reads format {FORMAT}; export it "
                "with armillary-export of the version that wrote it, and start from the export with --model.pretrained"
            )
        try:
            # Through JSON: strict validation of Python values would refuse a dict for the dataclass `FileRecord`.
            manifest = VALIDATOR.validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise Damaged(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        for name in manifest.files:
            if not is_file_name(name):
                raise Damaged(f"{MANIFEST}: files: {name!r} is not a file name")
        return manifest


VALIDATOR = TypeAdapter(Manifest)


def checkpoint_fault(folder: CheckpointFolder, step: int, reader: int = 0, readers: int = 1) -> str | None:
    """Returns the first fault of a checkpoint's manifest, or of a reader's share of its files; None if there is none.

    Args:
        reader, readers: as for `file_fault`.

    Raises:
        ValueError: the manifest has another format, or this process cannot read a file.
    """
    try:
        manifest = Manifest.read(folder.path_of(step))
    except Damaged as damage:
        return str(damage)
    if manifest.step != step:
        return f"{MANIFEST} is that of step {manifest.step}"
    return file_fault(manifest.files, folder.path_of(step), reader, readers)


def is_copy(folder: CheckpointFolder, step: int) -> bool:
    """Returns True if the folder of `step` is a copy of another step's, by its manifest."""
    try:
        return Manifest.read(folder.path_of(step)).step != step
    except Damaged:
        return False
