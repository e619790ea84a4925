"""The files of a checkpoint: each rank's tensors, which any mesh reads, and the manifest with everything else.

Every byte is under a checksum: the manifest has its own, and those of all files. Files of tensors have torch's format
for sharded tensors, which `HuggingFaceStorageReader` reads too: the metadata of a file has the offsets of each chunk in
its tensor.
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, cast
from zlib import crc32

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from armillary.core.internal import MAX_COUNT, file_size, is_file_name, open_file, parse_object, read_file, write_synced
from armillary.data.console import one_line
from armillary.models.internal import DTYPES, SUFFIX, TensorEntry, open_tensors, split, tensor_bytes
from armillary.models.parallel import local_part
from armillary.train.checkpoint.output_folder import CheckpointFolder
from armillary.train.config.overlay import flat
from armillary.train.ranks import Ranks

MANIFEST = "manifest.json"

# Version of the format, increased when older code cannot read new checkpoints. Formats 1 and 2 had pickles.
FORMAT = 3

# Maximum bytes of tensors in a file, unless one tensor is larger. Readers map a whole file into memory.
MAX_FILE_BYTES = 2**32

# Key of a file's metadata; torch's format for the offsets of chunks.
OFFSETS = "DCP_SHARDING_INFO"

# Bytes read from a file at a time, to compute its checksum.
READ_BYTES = 2**24

# Error numbers of a damaged file. After other errors, such as a lack of permission, the file may be intact.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ENXIO, errno.EFBIG)

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

Shape = tuple[int, ...]


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


@dataclass(frozen=True)
class Manifest:
    """The state of a checkpoint apart from tensors, as plain JSON.

    Args:
        step: the last trained step.
        tokens: tokens trained on so far, over all ranks.
        loader: state of the training rows, the same on all ranks.
        model: fields of a Hugging Face config.json.
        time: time of the commit, ISO 8601 in UTC.
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
        """Reads the manifest of a checkpoint.

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
            # Unknown fields, of later versions, are ignored.
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
    """Returns the first fault of a checkpoint's manifest, or in a reader's share of its files; None if there is none.

    Raises ValueError if the manifest has another format, or this process cannot read a file.
    """
    try:
        manifest = Manifest.read(folder.path_of(step))
    except Damaged as damage:
        return str(damage)
    if manifest.step != step:
        return f"{MANIFEST} is that of step {manifest.step}"
    return file_fault(manifest.files, folder.path_of(step), reader, readers)


def is_copy(folder: CheckpointFolder, step: int) -> bool:
    try:
        return Manifest.read(folder.path_of(step)).step != step  # the folder of another step was copied
    except Damaged:
        return False


# -- checksums --------------------------------------------------------------------------------------------------------


def file_fault(files: Mapping[str, FileRecord], folder: Path, reader: int = 0, readers: int = 1) -> str | None:
    """Returns the first fault in this reader's share of the files, of `readers` shares; None if all are intact.

    Raises ValueError if this process may not read a file.
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
    """Writes fields as JSON with their checksum, synced to disk."""
    write_synced(path, [(json.dumps({**fields, "crc32": checksum(fields)}, indent=2) + "\n").encode()])


def read_checked(path: Path) -> dict[str, Any]:
    """Returns the fields that `write_checked` wrote; raises as `reading`, or `Damaged` if they have changed."""
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
    """Turns an OSError into `Damaged`, or into a ValueError if the file may be intact, such as without permission."""
    try:
        yield
    except OSError as error:
        if error.errno in DAMAGE:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
        raise ValueError(
            f"{path} cannot be read ({error.strerror}), though it may be intact; make it readable for every rank, or "
            "move its checkpoint to another folder"
        ) from error


def write_recorded(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes a file, synced to disk, and returns its record without reading it."""
    size = checksum = 0

    def recorded() -> Iterator[bytes | memoryview]:
        nonlocal size, checksum
        for piece in pieces:
            size, checksum = size + len(piece), crc32(piece, checksum)
            yield piece

    write_synced(path, recorded())
    return FileRecord(size, checksum)


# -- writing tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    name: str
    dtype: torch.dtype
    offsets: Shape
    sizes: Shape


def save_tensors(folder: Path, state: Mapping[str, Any], ranks: Ranks | None = None) -> dict[str, FileRecord]:
    """Writes the tensors of a state. Collective: rank N writes `rank-N.safetensors`, and `rank-N-1` and so on if large.

    Each rank sends about 100 bytes per chunk to every other rank, and copies one tensor to the host at a time.

    Args:
        folder: existing folder for the files, which are flushed to disk.
        state: nested dicts of tensors; the shards of a `DTensor` may lie on any ranks.
        ranks: the ranks that save together. None: this process saves alone.

    Returns:
        The records of all ranks' files, on every rank.

    Raises:
        ValueError: a value cannot be saved, or no rank has some shard of a tensor; on every rank, before any writes.
        OSError: a file cannot be written; on every rank.
    """
    rank = ranks.rank if ranks else 0
    # 1. Ranks tell each other which chunks they have. One of the ranks that have a chunk writes it.
    tensors: dict[Chunk, Tensor] = {}
    shapes: dict[str, Shape] = {}

    def list_chunks() -> tuple[list[Chunk], dict[str, Shape]]:
        for name, x in flat(state):
            if not isinstance(x, Tensor):
                raise ValueError(f"{name} must be a tensor to be saved in a checkpoint")
            if x.dtype not in DTYPES.values():
                accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
                raise ValueError(f"{name} has dtype {x.dtype}; a checkpoint takes {accepted}")
            local, box = local_part(x)
            shapes[name] = tuple(x.shape)
            if local.numel() or not x.numel():  # an empty shard has nothing to save
                offsets = tuple(dim_slice.start for dim_slice in box)
                tensors[Chunk(name, x.dtype, offsets, tuple(local.shape))] = local
        return list(tensors), shapes

    answers = ranks.on_all(list_chunks) if ranks else [list_chunks()]
    chunks_by_writer = choose_writers([chunks for chunks, _ in answers])
    all_shapes = {name: shape for _, rank_shapes in answers for name, shape in rank_shapes.items()}
    check_complete((chunk for chunks in chunks_by_writer for chunk in chunks), all_shapes)

    # 2. Each rank writes its chunks.
    def write() -> dict[str, FileRecord]:
        records: dict[str, FileRecord] = {}
        chunks = {chunk.name: chunk for chunk in chunks_by_writer[rank]}
        own_tensors = {name: tensors[chunk] for name, chunk in chunks.items()}
        for number, names in enumerate(split(own_tensors, MAX_FILE_BYTES)):
            offsets = json.dumps({name: {"saved_offsets": list(chunks[name].offsets)} for name in names})
            metadata = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: offsets}
            file = f"rank-{rank}{f'-{number}' if number else ''}{SUFFIX}"
            pieces = tensor_bytes({name: own_tensors[name] for name in names}, metadata)
            records[file] = write_recorded(folder / file, pieces)
        return records

    records_by_rank = ranks.on_all(write) if ranks else [write()]
    return {file: record for records in records_by_rank for file, record in records.items()}


def choose_writers(chunks_by_rank: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Divides chunks among the ranks that have them. Every rank computes the same division."""
    holders: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(chunks_by_rank):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    chunks_by_writer: list[list[Chunk]] = [[] for _ in chunks_by_rank]
    written_bytes = [0] * len(chunks_by_rank)
    # A replicated chunk goes to the rank with the fewest bytes so far. Chunks of one rank come first, so that these
    # even out the bytes.
    for chunk, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        writer = min(ranks, key=written_bytes.__getitem__)
        chunks_by_writer[writer].append(chunk)
        written_bytes[writer] += prod(chunk.sizes) * chunk.dtype.itemsize
    return chunks_by_writer


def check_complete(chunks: Iterable[Chunk], shapes: Mapping[str, Shape]) -> None:
    """Raises ValueError unless the chunks of each tensor have one dtype, and as many elements as the tensor."""
    dtypes: dict[str, torch.dtype] = {}
    elements = Counter[str]()
    for chunk in chunks:
        if dtypes.setdefault(chunk.name, chunk.dtype) != chunk.dtype:
            raise ValueError(f"{chunk.name}: chunks of {dtypes[chunk.name]} and of {chunk.dtype}")
        elements[chunk.name] += prod(chunk.sizes)
    for name, shape in shapes.items():
        if elements[name] != prod(shape):
            raise ValueError(f"{name}: {elements[name]} elements of a tensor of {shape}")


# -- reading tensors --------------------------------------------------------------------------------------------------


class SavedTensors:
    """The tensors of a checkpoint, which ranks may send to each other. The constructor reads headers, and no data.

    Raises:
        Damaged: a header is invalid, or a tensor is incomplete.
        OSError: a file cannot be opened.
        ValueError: memory is short; the files may be intact.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self.folder = folder
        self.chunks: dict[str, list[Chunk]] = {}  # by name of the file
        self.shapes: dict[str, Shape] = {}
        try:
            # One file is open at a time, because a checkpoint has a file for each rank that saved it.
            for file in sorted(name for name in files if name.endswith(SUFFIX)):
                with ExitStack() as stack:
                    entries, metadata = open_tensors(folder / file, stack)
                    offsets = parse_object(metadata[OFFSETS]) if OFFSETS in metadata else None
                    self.chunks[file] = [chunk_of(entry, offsets) for entry in entries.values()]
            # A tensor ends where its last chunk does.
            all_chunks = [chunk for chunks in self.chunks.values() for chunk in chunks]
            for chunk in all_chunks:
                ends = tuple(offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
                shape = self.shapes.get(chunk.name, ends)
                self.shapes[chunk.name] = tuple(map(max, zip(shape, ends, strict=True)))
            check_complete(all_chunks, self.shapes)  # so no header can state a tensor larger than its data
        except MemoryError as error:
            raise ValueError(f"files of tensors cannot be read ({one_line(str(error))})") from error
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            raise Damaged(f"headers of tensors are invalid ({reason})") from error
        self.dtypes = {chunk.name: chunk.dtype for chunk in all_chunks}

    def describe(self, *prefixes: str) -> dict[str, str]:
        shapes = self.shapes.items()
        return {name: describe_tensor(shape, self.dtypes[name]) for name, shape in shapes if name.startswith(prefixes)}

    def fill(self, state: Mapping[str, Any]) -> None:
        """Fills this rank's shards of a state's tensors in place. Reads only their bytes; there is no communication.

        Raises ValueError for a tensor that was not saved, has another shape, or cannot be read, and OSError.
        """
        tensors = dict(flat(state))
        for name, x in tensors.items():
            if self.shapes.get(name) != tuple(x.shape):
                raise ValueError(f"{name} is {self.shapes.get(name, 'absent')} there and {tuple(x.shape)} here")
        local_parts = {name: local_part(x) for name, x in tensors.items()}
        for file, chunks in self.chunks.items():
            # The overlap of each chunk with this rank's box of the tensor: its starts and stops in the full tensor.
            overlaps: list[tuple[Chunk, list[int], list[int]]] = []
            for chunk in chunks:
                if chunk.name in local_parts:
                    _, box = local_parts[chunk.name]
                    dims = list(zip(box, chunk.offsets, chunk.sizes, strict=True))
                    starts = [max(dim_slice.start, offset) for dim_slice, offset, _ in dims]
                    stops = [min(dim_slice.stop, offset + size) for dim_slice, offset, size in dims]
                    if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                        overlaps.append((chunk, starts, stops))
            if not overlaps:
                continue
            try:
                with ExitStack() as stack, torch.no_grad():
                    entries, _ = open_tensors(self.folder / file, stack)
                    for chunk, starts, stops in overlaps:
                        local, box = local_parts[chunk.name]
                        values = entries[chunk.name].read(box_at(starts, stops, chunk.offsets))
                        local[box_at(starts, stops, [dim_slice.start for dim_slice in box])].copy_(values)
            except torch.OutOfMemoryError:
                raise
            except (SafetensorError, RuntimeError, MemoryError, KeyError) as error:
                reason = f"{type(error).__name__}: {one_line(str(error))}"
                raise ValueError(f"tensors cannot be read ({reason})") from error

    def read(self, prefix: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Returns full tensors on the CPU, by name below `prefix`: "model" or "optimizer".

        Raises ValueError if there are none or memory is short, and as `fill`.
        """
        tensors: dict[str, Tensor] = {}
        for full_name, shape in self.shapes.items():
            name = full_name.removeprefix(f"{prefix}.")
            if name != full_name:
                try:
                    tensors[name] = torch.empty(shape, dtype=dtype or self.dtypes[full_name])
                except RuntimeError as error:
                    raise ValueError(f"no memory for {name} {shape} ({str(error).splitlines()[0]})") from error
        if not tensors:
            raise ValueError(f"it holds no {prefix}")
        self.fill({prefix: tensors})
        return tensors


def chunk_of(entry: TensorEntry, offsets_by_name: Mapping[str, Any] | None) -> Chunk:
    """Returns the chunk in an entry of a file; without offsets it is a full tensor. Raises ValueError if invalid."""
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.key} is {entry.dtype}, not one of {', '.join(DTYPES)}")
    offsets = [0] * len(entry.shape) if offsets_by_name is None else offsets_by_name[entry.key]["saved_offsets"]
    is_valid = isinstance(offsets, list) and all(type(offset) is int and offset >= 0 for offset in cast(Any, offsets))
    if not is_valid or len(cast(Any, offsets)) != len(entry.shape):
        raise ValueError(f"{entry.key}: a chunk of {entry.shape} at {str(offsets)[:100]}")
    return Chunk(entry.key, DTYPES[entry.dtype], tuple(offsets), entry.shape)


def box_at(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for a, b, start in zip(starts, stops, origin, strict=True))


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns shape and dtype as text, equal for tensors of which one may be loaded into the other."""
    # Parameters have float32 or float64, and a run may resume in the other one.
    is_wide = dtype in (torch.float32, torch.float64)
    return f"{tuple(shape)} of {'float32 or float64' if is_wide else str(dtype).removeprefix('torch.')}"
