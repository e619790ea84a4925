"""A store in the making: parts are added one after the other, and each is there whole or not at all.

Everything is in the folder `path.partial` until it is complete. `progress.json` there says how much of each file is
good; it is replaced, not changed, and only when the files are on disk. Whoever goes on after a kill or on a full disk
cuts the files back to that.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.core.files import parse_json
from armillary.data.formats.folder import (
    BLOCK,
    DOCUMENTS,
    HASHES,
    SEGMENTS,
    TOKENS,
    Header,
    partial_folder,
    write_file,
)
from armillary.data.prepare.resume import PROGRESS, put_in_place
from armillary.data.shuffle import Index
from armillary.data.store import Integers, Vocabulary
from armillary.data.trees import SEGMENT, SegmentArray

SYNC_SECONDS = 2.0
"""How much work a kill may cost."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some documents as tokens.

    Args:
        tokens: of all of them joined, each with its end of document.
        lengths: int64 [d], tokens of each.
        hashes: uint64 [d], of their text.
        segments: `SEGMENT` [s] of all of them, joined, where they are trees; ends count from the first token.
    """

    tokens: Integers
    lengths: Index
    hashes: npt.NDArray[np.uint64]
    segments: SegmentArray | None = None


class BlockFile:
    """A file that is only added to, with a CRC-32 of every `BLOCK` bytes.

    Raises:
        ValueError: there is less of it than `size`.
    """

    def __init__(self, path: Path, size: int, checksums: list[int]) -> None:
        if size > (found := path.stat().st_size if path.exists() else 0):
            raise ValueError(f"{path} is cut off at byte {found} of {size}; remove {path.parent} and start again")
        self.size, self.checksums = size, list(checksums)  # what was said of whole parts must not change with it
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, array: npt.NDArray[Any]) -> None:
        data = array.view(np.uint8).data
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
        trees: parts have segments.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], trees: bool = False) -> None:
        self.path, self.folder, self._dtype = path, partial_folder(path), dtype.newbyteorder("<")
        self._progress = parse_json((self.folder / PROGRESS).read_text())
        known = self._progress["files"]
        names = (TOKENS, DOCUMENTS, HASHES, *([SEGMENTS] if trees else []))
        self._files = {name: BlockFile(self.folder / name, *known.get(name, (0, []))) for name in names}
        if not self._files[DOCUMENTS].size:
            self._files[DOCUMENTS].add(np.zeros(1, "<i8"))
        self._synced = time.monotonic()

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
        """Adds a part; `counts` are those of all parts so far. It is on disk when `sync` is next called."""
        ends = self.tokens + np.cumsum(part.lengths)
        if part.segments is not None:
            segments = part.segments.copy()
            segments["end"] += self.tokens
            self._files[SEGMENTS].add(segments)
        self._files[TOKENS].add(part.tokens.astype(self._dtype, copy=False))
        self._files[DOCUMENTS].add(ends.astype("<i8", copy=False))
        self._files[HASHES].add(part.hashes.astype("<u8", copy=False))
        # Only now, so that on a full disk what is said of the files holds for whole parts.
        files = {name: (file.size, list(file.checksums)) for name, file in self._files.items()}
        self._progress |= {"parts": self.parts + 1, "counts": counts, "files": files}
        if time.monotonic() > self._synced + SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Sees to it that a kill loses nothing that was added."""
        for file in self._files.values():
            file.sync()
        write_file(self.folder / PROGRESS, json.dumps(self._progress).encode())
        self._synced = time.monotonic()

    def finish(self, vocabulary: Vocabulary, summary: dict[str, Any]) -> Header:
        """Writes the header and moves the folder into its place; nothing is left of an older store there."""
        self.sync()
        checksums = {name: file.checksums for name, file in self._files.items()}
        name = self._dtype.newbyteorder("=").name
        segments = self._files[SEGMENTS].size // SEGMENT.itemsize if SEGMENTS in self._files else 0
        header = Header(name, self.tokens, self.documents, vocabulary, checksums, summary, segments)
        header.write(self.folder)
        put_in_place(self.path)
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # a disk that is full has no room for this either; the last sync holds
                self.sync()
        for file in self._files.values():
            file.close()
