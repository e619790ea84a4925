"""Writes the tensors of a rank to safetensors files, and records their checksums."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from armillary.core.parts import open_file
from armillary.train.checkpoint.reader import SUFFIX, Damaged, TensorReader
from armillary.train.runtime.health.ranks import Ranks

READ_BYTES = 2**24
"""Bytes read from a file at a time, to compute its checksum."""

MAX_FILE_BYTES = 2**32
"""Maximum bytes of tensors in a file, unless one tensor is larger. Readers map a whole file into memory."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors."""


@dataclass(frozen=True)
class FileRecord:
    """Size of a file in bytes, and the CRC-32 of its content."""

    size: Annotated[int, Field(ge=0)]
    crc32: Annotated[int, Field(ge=0, lt=2**32)]

    def add(self, data: memoryview) -> FileRecord:
        """Returns the record once `data` is appended to the file."""
        return FileRecord(self.size + len(data), crc32(data, self.crc32))

    @classmethod
    def of_file(cls, path: Path) -> FileRecord:
        record = cls(0, 0)
        with open_file(path) as file:
            while block := file.read(READ_BYTES):
                record = record.add(memoryview(block))
        return record


class RecordedFile(io.FileIO):
    """A new file that updates `record` (size and CRC-32) with everything written to it."""

    record = FileRecord(0, 0)

    def write(self, data: Any, /) -> int:
        unwritten = memoryview(data).cast("B")
        # A raw file may write only a part of the data at a time.
        while unwritten:
            count = super().write(unwritten)
            self.record = self.record.add(unwritten[:count])
            unwritten = unwritten[count:]
        return memoryview(data).nbytes


class TensorWriter(StorageWriter):
    """Writes the tensors of each rank to `rank-N.safetensors`, in torch's format for sharded tensors.

    More than `MAX_FILE_BYTES` of tensors continue in `rank-N-1.safetensors` and so on. Files are flushed to disk.

    `HuggingFaceStorageReader` reads these files. torch's `HuggingFaceStorageWriter` writes the same format, but needs
    memory for two more copies of a file's tensors and twice the time. It also writes an unreadable file, without an
    error, if a value of the state is not a tensor.

    Args:
        folder: existing folder for the files.
        ranks: the ranks that save together; each waits until all have written. None: this process saves alone.
    """

    def __init__(self, folder: Path, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.folder, self.ranks = folder, ranks
        self.files: dict[str, FileRecord] = {}
        """Records of all ranks' files by name; set on rank 0 by `finish`."""

    # `dcp.save` calls three methods that do something: on every rank `prepare_local_plan` and `write_data`, and then on
    # rank 0 `finish`. If one of them raises, `dcp.save` raises a `CheckpointException` on every rank.

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Checks this rank's items before any rank writes; see `check_items`."""
        check_items(plan.items)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and waits for the other ranks. Returns the record of each file."""
        files: list[WriteResult] = []
        rank = self.ranks.rank if self.ranks else 0
        try:
            for number, items in enumerate(split_items(plan.items)):
                name = f"rank-{rank}{f'-{number}' if number else ''}{SUFFIX}"
                record = write_tensors(self.folder / name, items, planner)
                files.append(WriteResult(MetadataIndex(name), record.size, record))
        finally:
            # DCP exchanges the results next, and would not name a rank that is missing there; `barrier` does. A rank
            # whose write failed comes here too, because the other ranks wait for it.
            if self.ranks is not None:
                self.ranks.barrier()
        results: Future[list[WriteResult]] = Future()
        results.set_result(files)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Sets `files` from the results of all ranks, and reads the headers of these files back. Runs on rank 0.

        Args:
            metadata: the tensors that DCP planned to save, with their global sizes.
            results: by rank, its results of `write_data`.

        Raises:
            OSError: a header cannot be read, or the files do not have all planned tensors.
        """
        # The names come from the results: a network file system may not list files of other hosts yet.
        self.files = {file.index.fqn: file.storage_data for rank_results in results for file in rank_results}
        reader = TensorReader(self.folder, self.files)
        try:
            file_metadata = reader.read_metadata().state_dict_metadata
        except Damaged as damage:
            raise OSError(f"the written files cannot be read: {damage}") from damage
        # The reader has checked that each tensor's chunks are complete. Their tensors must be the planned ones.
        sizes = {name: entry.size for name, entry in file_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata) or sizes.get(name) != entry.size:
                raise OSError(f"the written files do not have all of {name}")

    # The other methods that the base class demands.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def check_items(items: Sequence[WriteItem]) -> None:
    """Raises ValueError for items that a safetensors file cannot store.

    These are values that are not tensors, tensors of other dtypes, and several chunks of one tensor.
    """
    for item in items:
        name = item.index.fqn
        if item.tensor_data is None:
            raise ValueError(f"{name} must be a tensor to be saved in a checkpoint")
        if item.tensor_data.properties.dtype not in DTYPES:
            dtype_names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"{name} has dtype {item.tensor_data.properties.dtype}; a checkpoint takes {dtype_names}")
    for name, count in Counter(item.index.fqn for item in items).items():
        if count > 1:
            raise ValueError(f"{name} has {count} chunks on one rank; a checkpoint takes one")


def split_items(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divides a rank's items among files of at most `MAX_FILE_BYTES` of tensors.

    Chunks with the largest elements come first: float64 before float32 before bfloat16. So each chunk begins at a
    multiple of its element size, as a tensor in a file that is mapped into memory must.
    """
    files: list[list[WriteItem]] = []
    file_bytes = MAX_FILE_BYTES  # as if the previous file were full, so that the first item opens a file
    for item in sorted(items, key=lambda item: (-tensor_data(item).properties.dtype.itemsize, item.index.fqn)):
        nbytes = chunk_bytes(tensor_data(item))
        if file_bytes + nbytes > MAX_FILE_BYTES:
            files.append([])
            file_bytes = 0
        files[-1].append(item)
        file_bytes += nbytes
    return files


def write_tensors(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> FileRecord:
    """Writes the chunks of one file, one after the other, so that at most one chunk is copied to the host at a time."""
    with RecordedFile(path, "x") as file:
        file.write(header({item.index.fqn: tensor_data(item) for item in items}))
        for item in items:
            tensor: Any = planner.resolve_data(item)
            file.write(bytes_of(tensor))
        os.fsync(file.fileno())
    return file.record


def tensor_data(item: WriteItem) -> TensorWriteData:
    """Returns dtype, offsets and sizes of an item's chunk; `check_items` has refused items without a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def chunk_bytes(data: TensorWriteData) -> int:
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def header(chunks: dict[str, TensorWriteData]) -> bytes:
    """Returns the header of a safetensors file with these chunks, in order.

    A file contains, in order: the length of a JSON text (8 bytes), the text, and the data of all chunks. The text has
    the dtype, shape and position of each chunk, and under "__metadata__", for torch, the offsets of each chunk in its
    tensor.
    """
    entries: dict[str, Any] = {}
    start = 0
    for name, data in chunks.items():
        end = start + chunk_bytes(data)
        dtype, shape = DTYPES[data.properties.dtype], list(data.chunk.sizes)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    offsets = {name: {"saved_offsets": list(data.chunk.offsets)} for name, data in chunks.items()}
    entries["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor; readers map the file
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    # Viewed as uint8, because numpy has no bfloat16.
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())
