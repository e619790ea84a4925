"""DCP's `.metadata` as data: a restricted unpickler builds inert records, whose types and values are then checked."""

from __future__ import annotations

import pickle
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from armillary.core.files import is_file_name
from armillary.data.console.exit import one_line

METADATA = ".metadata"
MAX_SIZE = torch.iinfo(torch.int64).max


class Damaged(Exception):
    """A checkpoint does not hold what was written; says what differs."""


def read_metadata(folder: Path) -> Metadata:
    """Returns DCP's metadata of the checkpoint in `folder`: the tensors, and the file and range of bytes of each chunk.

    Every chunk of a tensor has bytes enough for its elements; `check_files` compares these with the files.

    Raises:
        Damaged: the file holds something else.
        OSError: it cannot be read.
    """
    with (folder / METADATA).open("rb") as file:
        try:
            return to_metadata(RecordUnpickler(file).load())
        except OSError:
            raise
        except Exception as error:  # a broken pickle can fail with any exception
            raise Damaged(f"{METADATA} is not that of a checkpoint ({one_line(str(error))})") from error


def check_files(folder: Path, metadata: Metadata) -> None:
    """Compares the ranges of bytes in `metadata` with the sizes of the checkpoint's files.

    Memory is allocated by the sizes in the metadata, so that they must not exceed the data that is there.

    Raises:
        Damaged: a file is missing, or shorter than its ranges or their sum: they would overlap.
        OSError: a file cannot be read.
    """
    total_bytes: dict[str, int] = defaultdict(int)
    end_offsets: dict[str, int] = defaultdict(int)
    for storage in cast("dict[MetadataIndex, _StorageInfo]", metadata.storage_data).values():
        total_bytes[storage.relative_path] += storage.length
        end_offsets[storage.relative_path] = max(end_offsets[storage.relative_path], storage.offset + storage.length)
    for name in total_bytes:
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise Damaged(f"{METADATA} names {name}, and there is no such file") from error
        if size < (expected := max(total_bytes[name], end_offsets[name])):
            raise Damaged(f"{METADATA} places {expected} bytes in {name}, which has {size}")


class Record:
    """Stands for any object in a pickle and keeps its `state` alone. Constructor arguments are ignored."""

    state: Any = None

    def __new__(cls, *arguments: Any) -> Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class MemoryFormat(Record):
    """Stands for the enum of torch's memory formats."""


class EnumMember(Record):
    """`getattr(MemoryFormat, name)`, as Python 3.11.0 to 3.11.3 pickle an enum's member.

    A general `getattr` would give a pickle access to everything; here the two arguments must be the enum and the name
    of a member. It is a class because a pickle could set attributes of a function.
    """

    ARGUMENTS = frozenset((MemoryFormat, name) for name in _MEM_FORMAT_ENCODING.__members__)

    def __new__(cls, *arguments: Any) -> Record:
        if arguments not in cls.ARGUMENTS:
            raise pickle.UnpicklingError("it calls getattr for something else than a member of an enum")
        return super().__new__(cls)


RECORDS: dict[type, type[Record]] = {
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
"""The record class for each of torch's classes."""

GLOBALS: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): record for kind, record in RECORDS.items()},
    ("torch", "Size"): tuple,
    # Fields of checkpoints that are not used here.
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): MemoryFormat,
    ("builtins", "getattr"): EnumMember,
    ("torch.serialization", "_get_layout"): Record,
    **{(module, "PosixPath"): Record for module in ("pathlib", "pathlib._local")},
}


class RecordUnpickler(pickle.Unpickler):
    """Resolves the names in `GLOBALS` and torch's dtypes. None of these has an effect when it is called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in GLOBALS:
            return GLOBALS[module_name, global_name]
        dtype = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def to_metadata(record: object) -> Metadata:
    """Returns torch's `Metadata`, with the fields that reading needs."""
    fields = state_dict_of(record, Metadata)
    entries = {of(name, str): to_entry(entry) for name, entry in of(fields["state_dict_metadata"], dict).items()}
    storage = {to_index(key): to_storage(value) for key, value in of(fields["storage_data"], dict).items()}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            check_chunks(name, entry, storage)
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta())


def to_entry(record: object) -> STORAGE_TYPES:
    if isinstance(record, RECORDS[BytesStorageMetadata]):
        return BytesStorageMetadata()
    fields = state_dict_of(record, TensorStorageMetadata)
    chunks = [state_dict_of(chunk, ChunkStorageMetadata) for chunk in of(fields["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=of(of(state_of(fields["properties"], TensorProperties), tuple)[0], torch.dtype)),
        to_size(fields["size"]),
        [ChunkStorageMetadata(to_size(chunk["offsets"]), to_size(chunk["sizes"])) for chunk in chunks],
    )


def check_chunks(name: str, entry: TensorStorageMetadata, storage: dict[MetadataIndex, _StorageInfo]) -> None:
    """Checks that the chunks of a tensor lie within it, have its number of elements together, and are stored.

    Elements in no chunk would silently keep their values.
    """
    size, itemsize = entry.size, entry.properties.dtype.itemsize
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if any(a + b > room for a, b, room in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"{name}: a chunk of {sizes} at {offsets} is not in {tuple(size)}")
        place = storage.get(MetadataIndex(name, chunk.offsets))
        if place is None or place.length < prod(sizes) * itemsize:
            length = 0 if place is None else place.length
            raise ValueError(f"{name}: {length} bytes are stored of a chunk of {sizes}")
    if (elements := sum(prod(chunk.sizes) for chunk in entry.chunks)) != prod(size):
        raise ValueError(f"{name}: {elements} elements of a tensor of {tuple(size)}")


def to_index(record: object) -> MetadataIndex:
    fields = state_dict_of(record, MetadataIndex)
    offset, place = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        of(fields["fqn"], str), None if offset is None else to_size(offset), None if place is None else of(place, int)
    )


def to_storage(record: object) -> _StorageInfo:
    """Returns a chunk's file, which lies in the checkpoint's own folder, and its range of bytes there."""
    fields = state_dict_of(record, _StorageInfo)
    name = of(fields["relative_path"], str)
    if not is_file_name(name):
        raise ValueError(f"relative_path={name!r} is no file name")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name}: transform_descriptors={fields['transform_descriptors']!r} are not supported")
    offset, length = to_size((fields["offset"], fields["length"]))
    return _StorageInfo(name, offset, length)


def to_size(record: object) -> torch.Size:
    numbers = [of(number, int) for number in of(record, tuple)]
    if any(not 0 <= number <= MAX_SIZE for number in numbers):
        raise ValueError(f"size {numbers} must lie between 0 and 2^63 - 1")
    return torch.Size(numbers)


def state_dict_of(record: object, kind: type) -> dict[str, Any]:
    return cast(dict[str, Any], of(state_of(record, kind), dict))


def state_of(record: object, kind: type) -> Any:
    """Returns the state of a record that stands for an object of class `kind`."""
    return of(record, RECORDS[kind]).state


def of(value: Any, kind: type) -> Any:
    """Returns the value, which must have exactly this type: True is no integer.

    Raises:
        TypeError: it has another type.
    """
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value
