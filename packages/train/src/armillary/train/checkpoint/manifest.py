"""The manifest of a checkpoint: its files with sizes and checksums, and the state of the run apart from tensors.

Every byte of a checkpoint is under a checksum: the manifest has its own, and those of all files.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

from pydantic import Field, TypeAdapter, ValidationError

from armillary.core.parts import MAX_COUNT, file_size, is_file_name, open_file, parse_object, read_file, write_synced
from armillary.train.checkpoint.folder import CheckpointFolder

MANIFEST = "manifest.json"
FORMAT = 3
"""Version of the format, increased when older code cannot read new checkpoints. Formats 1 and 2 had pickles."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

READ_BYTES = 2**24
"""Bytes read from a file at a time, to compute its checksum."""

DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENXIO, errno.EFBIG)
"""Error numbers of a damaged file. After other errors, such as a lack of permission, the file may be intact."""


class Damaged(Exception):
    """A checkpoint has changed since it was written; the message says how."""


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and the CRC-32 of its content."""

    size: Annotated[int, Field(ge=0)]
    crc32: Annotated[int, Field(ge=0, lt=2**32)]

    @classmethod
    def of_file(cls, path: Path) -> FileRecord:
        size = checksum = 0
        with open_file(path) as file:
            while block := file.read(READ_BYTES):
                size, checksum = size + len(block), crc32(block, checksum)
        return cls(size, checksum)


def write_recorded(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes a file, flushes it to disk, and returns its record, without reading the file."""
    size = checksum = 0

    def recorded() -> Iterator[bytes | memoryview]:
        nonlocal size, checksum
        for piece in pieces:
            size, checksum = size + len(piece), crc32(piece, checksum)
            yield piece

    write_synced(path, recorded())
    return FileRecord(size, checksum)


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


# -- files -------------------------------------------------------------------------------------------------------------


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
    write_synced(path, [(json.dumps({**fields, "crc32": checksum(fields)}, indent=2) + "\n").encode()])


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
