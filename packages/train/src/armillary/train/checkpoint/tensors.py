"""The tensors of a checkpoint: each rank writes its shards to safetensors files, and any mesh reads them.

The files have torch's format for sharded tensors, which `HuggingFaceStorageReader` reads too: the metadata of a file
has the offsets of each chunk in its tensor.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from armillary.core.parts import parse_object
from armillary.data.console import one_line
from armillary.models.parallel import local_part
from armillary.models.parts import DTYPES, SUFFIX, TensorEntry, open_tensors, split, tensor_bytes
from armillary.train.checkpoint.manifest import Damaged, FileRecord, write_recorded
from armillary.train.runtime.health.ranks import Ranks

MAX_FILE_BYTES = 2**32
"""Maximum bytes of tensors in a file, unless one tensor is larger. Readers map a whole file into memory."""

OFFSETS = "DCP_SHARDING_INFO"
"""Key of a file's metadata; torch's format for the offsets of chunks."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: the shard of a rank."""

    name: str
    dtype: torch.dtype
    offsets: Shape
    sizes: Shape


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested dicts by their keys, joined by dots."""
    values: dict[str, Any] = {}
    for key, value in state.items():
        values |= flatten(cast(Any, value), f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return values


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns shape and dtype as text, equal for tensors of which one may be loaded into the other.

    These have equal dtypes, or float32 and float64, the dtypes of parameters: a run may resume in the other one.
    """
    is_wide = dtype in (torch.float32, torch.float64)
    return f"{tuple(shape)} of {'float32 or float64' if is_wide else str(dtype).removeprefix('torch.')}"


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


# -- writing ----------------------------------------------------------------------------------------------------------


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
        for name, x in flatten(state).items():
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
    """Divides chunks among the ranks that have them: a replicated chunk goes to the rank with the fewest bytes so far.

    Every rank computes the same division.
    """
    holders: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(chunks_by_rank):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    chunks_by_writer: list[list[Chunk]] = [[] for _ in chunks_by_rank]
    written_bytes = [0] * len(chunks_by_rank)
    # Chunks of one rank come first, so that replicated ones even out the bytes.
    for chunk, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        writer = min(ranks, key=written_bytes.__getitem__)
        chunks_by_writer[writer].append(chunk)
        written_bytes[writer] += prod(chunk.sizes) * chunk.dtype.itemsize
    return chunks_by_writer


# -- reading ----------------------------------------------------------------------------------------------------------


class SavedTensors:
    """The tensors of a checkpoint. The constructor reads the headers of its files, and no data.

    Ranks may send it to each other.

    The chunks of each tensor must have its dtype and as many elements as the tensor, so that no header can state a
    tensor larger than its data.

    Args:
        folder: folder of the checkpoint.
        files: names of its files; other files in the folder are not read.

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
            check_complete(all_chunks, self.shapes)
        except MemoryError as error:
            raise ValueError(f"files of tensors cannot be read ({one_line(str(error))})") from error
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            raise Damaged(f"headers of tensors are invalid ({reason})") from error
        self.dtypes = {chunk.name: chunk.dtype for chunk in all_chunks}

    def describe(self, *prefixes: str) -> dict[str, str]:
        """Returns descriptions of the tensors whose names begin with one of the prefixes, by name."""
        shapes = self.shapes.items()
        return {name: describe_tensor(shape, self.dtypes[name]) for name, shape in shapes if name.startswith(prefixes)}

    def fill(self, state: Mapping[str, Any]) -> None:
        """Fills this rank's shards of a state's tensors in place. Reads only their bytes; there is no communication.

        Raises:
            ValueError: a tensor was not saved, or has another shape, or cannot be read.
            OSError: a file cannot be opened.
        """
        tensors = flatten(state)
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
        """Returns full tensors on the CPU: those whose names begin with `prefix` and a dot, by the remaining name.

        Args:
            prefix: "model" or "optimizer".
            dtype: dtype of the returned tensors; None: as saved.

        Raises:
            ValueError: there are no tensors below `prefix`, or they do not fit into memory; or as `fill`.
            OSError: a file cannot be opened.
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
    """Returns the chunk that an entry of a file is; without offsets, a full tensor. Raises ValueError if invalid."""
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.key} is {entry.dtype}, not one of {', '.join(DTYPES)}")
    offsets = [0] * len(entry.shape) if offsets_by_name is None else offsets_by_name[entry.key]["saved_offsets"]
    is_valid = isinstance(offsets, list) and all(type(offset) is int and offset >= 0 for offset in cast(Any, offsets))
    if not is_valid or len(cast(Any, offsets)) != len(entry.shape):
        raise ValueError(f"{entry.key}: a chunk of {entry.shape} at {str(offsets)[:100]}")
    return Chunk(entry.key, DTYPES[entry.dtype], tuple(offsets), entry.shape)


def box_at(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Returns a box relative to `origin`."""
    return tuple(slice(a - start, b - start) for a, b, start in zip(starts, stops, origin, strict=True))
