"""A store in the making: parts are added one after the other, and each is there whole or not at all.

Everything is in the folder `path.partial` until it is complete. `progress.json` there says how much of each file is
good; it is replaced, not changed, and only when the files are on disk. Whoever goes on after a kill or on a full disk
cuts the files back to that.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.data.formats.folder import BLOCK, DOCUMENTS, HASHES, TOKENS, Header, write_file
from armillary.data.prepare.unfinished import PROGRESS, partial_folder
from armillary.data.store import Index, Integers, Vocabulary


@dataclass(frozen=True, eq=False)
class Part:
    """Some documents as tokens.

    Args:
        tokens: of all of them joined, each with its end of document.
        lengths: int64 [d], tokens of each.
        hashes: uint64 [d], of their text.
    """

    tokens: Integers
    lengths: Index
    hashes: npt.NDArray[np.uint64]


class BlockFile:
    """A file that is only added to, with a CRC-32 of every `BLOCK` bytes."""

    def __init__(self, path: Path, size: int, checksums: list[int]) -> None:
        self.size, self.checksums = size, checksums
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, data: memoryview) -> None:
        while data:
            written = self._file.write(data[: BLOCK - self.size % BLOCK])
            if self.size % BLOCK == 0:
                self.checksums.append(0)
            self.checksums[-1] = crc32(data[:written], self.checksums[-1])
            self.size, data = self.size + written, data[written:]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class StoreWriter:
    """Adds parts to a folder where `begin` was called; `finish` makes it the store at `path`.

    Args:
        dtype: of tokens.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.folder, self._dtype = path, partial_folder(path), dtype.newbyteorder("<")
        self._progress = json.loads((self.folder / PROGRESS).read_text())
        known = self._progress["files"]
        names = (TOKENS, DOCUMENTS, HASHES)
        self._files = {name: BlockFile(self.folder / name, *known.get(name, (0, []))) for name in names}
        if not self._files[DOCUMENTS].size:
            self._files[DOCUMENTS].add(memoryview(np.zeros(1, "<i8")).cast("B"))

    @property
    def parts(self) -> int:
        """Parts that are there."""
        return self._progress["parts"]

    @property
    def counts(self) -> dict[str, Any]:
        """What `add` was last told."""
        return self._progress["counts"]

    @property
    def tokens(self) -> int:
        return self._files[TOKENS].size // self._dtype.itemsize

    @property
    def documents(self) -> int:
        return self._files[DOCUMENTS].size // 8 - 1

    def add(self, part: Part, counts: dict[str, Any]) -> None:
        """Adds a part, on disk before this returns; `counts` are those of all parts so far."""
        ends = self.tokens + np.cumsum(part.lengths)
        self._files[TOKENS].add(memoryview(part.tokens.astype(self._dtype, copy=False)).cast("B"))
        self._files[DOCUMENTS].add(memoryview(ends.astype("<i8", copy=False)).cast("B"))
        self._files[HASHES].add(memoryview(part.hashes.astype("<u8", copy=False)).cast("B"))
        for file in self._files.values():
            file.sync()
        files = {name: (file.size, file.checksums) for name, file in self._files.items()}
        self._progress |= {"parts": self.parts + 1, "counts": counts, "files": files}
        write_file(self.folder / PROGRESS, json.dumps(self._progress).encode())

    def finish(self, vocabulary: Vocabulary, summary: dict[str, Any]) -> Header:
        """Writes the header and moves the folder into its place; nothing is left of an older store there."""
        checksums = {name: file.checksums for name, file in self._files.items()}
        name = self._dtype.newbyteorder("=").name
        header = Header(name, self.tokens, self.documents, vocabulary, checksums, summary)
        header.write(self.folder)
        (self.folder / PROGRESS).unlink()
        older = self.path.with_name(self.path.name + ".older")
        if self.path.exists():
            shutil.rmtree(older, ignore_errors=True)
            self.path.rename(older)
        self.folder.rename(self.path)
        shutil.rmtree(older, ignore_errors=True)
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
