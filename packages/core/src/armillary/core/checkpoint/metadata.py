"""DCP's `.metadata` without pickle: unpickled to records that can do nothing, which are checked one by one."""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from armillary.core.commands import one_line

METADATA = ".metadata"


class Damaged(Exception):
    """A checkpoint does not hold what was written; says what differs."""


def read_metadata(place: Path) -> Metadata:
    """DCP's metadata of the checkpoint at `place`: which tensors there are, and in which file each part of them lies.

    Raises:
        Damaged: the file holds something else.
        OSError: it cannot be read.
    """
    with (place / METADATA).open("rb") as file:
        try:
            return converted(Records(file).load())
        except OSError:
            raise
        except Exception as error:  # a broken pickle fails in any way
            raise Damaged(f"{METADATA} is not that of a checkpoint ({one_line(str(error))})") from error


class Record:
    """What an object in a pickle comes to: only its `state`. Made from any arguments, and none of them is used."""

    state: Any = None

    def __new__(cls, *arguments: Any) -> Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


KINDS: dict[type, type[Record]] = {
    kind: type(kind.__name__, (Record,), {})
    for kind in (
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
        TensorProperties,
        ChunkStorageMetadata,
        BytesStorageMetadata,
        StorageMeta,
        _StorageInfo,
    )
}
"""torch's classes, and the records that stand for them while a pickle is read."""

KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): record for kind, record in KINDS.items()},
    ("torch", "Size"): tuple,
    # What checkpoints hold and nobody needs.
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): Record,
    ("torch.serialization", "_get_layout"): Record,
    **{(module, "PosixPath"): Record for module in ("pathlib", "pathlib._local")},
}


class Records(pickle.Unpickler):
    """Knows these names and torch's dtypes, and no others. None of them does anything when it is called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in KNOWN:
            return KNOWN[module_name, global_name]
        found = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def converted(read: object) -> Metadata:
    """torch's value of the records that were read; what it plans by is not needed."""
    fields = state(read, Metadata)
    entries = {of(name, str): entry(found) for name, found in of(fields["state_dict_metadata"], dict).items()}
    stored = {index(found): piece(where) for found, where in of(fields["storage_data"], dict).items()}
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def entry(read: object) -> STORAGE_TYPES:
    if isinstance(read, KINDS[BytesStorageMetadata]):
        return BytesStorageMetadata()
    fields = state(read, TensorStorageMetadata)
    parts = [state(chunk, ChunkStorageMetadata) for chunk in of(fields["chunks"], list)]
    whole, chunks = size(fields["size"]), [ChunkStorageMetadata(size(x["offsets"]), size(x["sizes"])) for x in parts]
    check_chunks(whole, chunks)
    return TensorStorageMetadata(
        TensorProperties(dtype=of(of(state_of(fields["properties"], TensorProperties), tuple)[0], torch.dtype)),
        whole,
        chunks,
    )


def check_chunks(whole: torch.Size, chunks: list[ChunkStorageMetadata]) -> None:
    """Refuses chunks that do not lie in their tensor, or have other numbers of elements than it together: what none of
    them holds would be left as it was."""
    for chunk in chunks:
        ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > room for end, room in zip(ends, whole, strict=True)):
            raise ValueError(f"a part of {tuple(chunk.sizes)} at {tuple(chunk.offsets)} is not in {tuple(whole)}")
    held = sum(prod(chunk.sizes) for chunk in chunks)
    if held != prod(whole):
        raise ValueError(f"{held} elements of a tensor of {tuple(whole)}")


def index(read: object) -> MetadataIndex:
    fields = state(read, MetadataIndex)
    offset, place = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        of(fields["fqn"], str), None if offset is None else size(offset), None if place is None else of(place, int)
    )


def piece(read: object) -> _StorageInfo:
    """Where a part of a tensor lies: in a file of the checkpoint's own folder."""
    fields = state(read, _StorageInfo)
    name = of(fields["relative_path"], str)
    if Path(name).name != name or fields.get("transform_descriptors"):
        raise ValueError(f"{name!r} is no file of a checkpoint")
    offset, length = size((fields["offset"], fields["length"]))
    return _StorageInfo(name, offset, length)


def size(read: object) -> torch.Size:
    numbers = [of(number, int) for number in of(read, tuple)]
    if any(number < 0 for number in numbers):
        raise ValueError(f"{numbers} below 0")
    return torch.Size(numbers)


def state(read: object, kind: type) -> dict[str, Any]:
    return cast(dict[str, Any], of(state_of(read, kind), dict))


def state_of(read: object, kind: type) -> Any:
    return of(read, KINDS[kind]).state


def of(value: Any, kind: type) -> Any:
    """The value, if it is of this kind.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value
