"""DCP's writer, that knows the checksums of what it has written, and why it could not."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from armillary.train.runtime.health.ranks import Ranks

CHUNK = 2**24


@dataclass(frozen=True)
class Written:
    """A file as it was written: bytes, and CRC-32 of them."""

    size: int
    crc32: int


def read_back(path: Path) -> Written:
    """Size and checksum of what is there."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), crc32(chunk, crc)
    return Written(size, crc)


class CheckedFile(io.FileIO):
    """A new file that counts and sums up what is written, and keeps the error of a write that failed."""

    written = Written(0, 0)
    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                count = super().write(left)
                self.written = Written(self.written.size + count, crc32(left[:count], self.written.crc32))
                left = left[count:]
        except OSError as error:
            self.failure = error
            raise
        return memoryview(data).nbytes


class CheckedFiles(FileSystem):
    """The file system as DCP sees it; `written` are this process's files by name."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        file = CheckedFile(path, mode)
        try:
            with file:
                yield file
        finally:
            self.written[Path(path).name] = file.written
            self.failure = self.failure or file.failure

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class CheckedWriter(FileSystemWriter):
    """Writes this rank's files of a checkpoint, down to the disk. No rank goes on before all have written theirs."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        super().__init__(path, sync_files=True)
        self.fs = self.files = CheckedFiles()
        self.ranks = ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError:  # torch's, in place of the error that its stream had
            if self.files.failure is None:
                raise
            raise self.files.failure from None
        finally:
            self.ranks.gather()
