"""`StoreWriter`: appends tokenized parts to a store, such that a killed process loses at most the last seconds of work.

Files grow in the folder `path.partial` until the store is complete. `progress.json` in this folder records the valid
size of each file, its checksums, and counts. It is replaced atomically after the files have been flushed to disk, and a
run that resumes truncates the files to these sizes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

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
from armillary.data.prepare.resume import PROGRESS, put_in_place, read_progress
from armillary.data.shuffle import Index
from armillary.data.store import Integers, Vocabulary
from armillary.data.trees import SEGMENT, SegmentArray

SYNC_SECONDS = 2.0
"""Least seconds between flushes to disk: about the work that a killed process loses."""


@dataclass(frozen=True, eq=False)
class Part:
    """Tokenized documents, such as the documents of an input chunk.

    Args:
        tokens: the concatenated documents, each with its end-of-document token.
        lengths: int64 [d], number of tokens of each document.
        hashes: uint64 [d], hash of each document's text; of a tree, of its root's text.
        segments: if documents are trees, their segments: `SEGMENT` [s], whose ends count from the part's first token.
    """

    tokens: Integers
    lengths: Index
    hashes: npt.NDArray[np.uint64]
    segments: SegmentArray | None = None

    @classmethod
    def concatenate(cls, parts: Sequence[Part]) -> Part:
        """Returns the concatenation of parts, all with segments or all without."""
        segments, offset = list[SegmentArray](), 0
        for part in parts:
            if part.segments is not None:
                segments.append(part.shifted_segments(offset))
            offset += len(part.tokens)
        tokens, lengths, hashes = zip(*((part.tokens, part.lengths, part.hashes) for part in parts), strict=True)
        all_segments = np.concatenate(segments) if segments else None
        return cls(np.concatenate(tokens), np.concatenate(lengths), np.concatenate(hashes), all_segments)

    def shifted_segments(self, offset: int) -> SegmentArray:
        """Returns the segments of a part that follows `offset` tokens: their ends, increased by `offset`."""
        assert self.segments is not None
        segments = self.segments.copy()
        segments["end"] += offset
        return segments


class BlockFile:
    """An append-only file with a CRC-32 of every `BLOCK` bytes.

    Args:
        size: number of valid bytes of an existing file; later bytes are truncated.
        checksums: CRC-32 of each block of the valid bytes.

    Raises:
        ValueError: the file is shorter than `size`.
    """

    def __init__(self, path: Path, size: int, checksums: list[int]) -> None:
        if size > (actual := path.stat().st_size if path.exists() else 0):
            raise ValueError(f"{path} is cut off at byte {actual} of {size}; remove {path.parent} and start again")
        self.size, self.checksums = size, list(checksums)  # a copy: the recorded progress must not change with it
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, array: npt.NDArray[Any]) -> None:
        """Appends the bytes of an array."""
        data = array.view(np.uint8).data
        while data:
            # Writes at most to the end of the block, so that each write belongs to one checksum.
            written_bytes = self._file.write(data[: BLOCK - self.size % BLOCK])
            if self.size % BLOCK == 0:
                self.checksums.append(0)
            self.checksums[-1] = crc32(data[:written_bytes], self.checksums[-1])
            self.size, data = self.size + written_bytes, data[written_bytes:]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class StoreWriter:
    """Appends parts to a folder created by `begin`; `finish` turns it into the store at `path`.

    Args:
        dtype: dtype of the tokens on disk.
        trees: True if parts have segments.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], trees: bool = False) -> None:
        self.path, self.folder, self._dtype = path, partial_folder(path), dtype.newbyteorder("<")
        self._progress = read_progress(self.folder)
        sizes = self._progress["files"]
        names = (TOKENS, DOCUMENTS, HASHES, *([SEGMENTS] if trees else []))
        self._files = {name: BlockFile(self.folder / name, *sizes.get(name, (0, []))) for name in names}
        if not self._files[DOCUMENTS].size:  # a new store: the first document starts at token 0
            self._files[DOCUMENTS].add(np.zeros(1, "<i8"))
        self._synced = time.monotonic()

    @property
    def parts(self) -> int:
        """Number of parts added, by this run and by interrupted ones."""
        return self._progress["parts"]

    @property
    def counts(self) -> dict[str, Any]:
        """The counts that the last call of `add` was given."""
        return self._progress["counts"]

    @property
    def tokens(self) -> int:
        """Number of tokens in all parts."""
        return self._files[TOKENS].size // self._dtype.itemsize

    @property
    def documents(self) -> int:
        """Number of documents in all parts."""
        return self._files[DOCUMENTS].size // 8 - 1  # int64 boundaries: one more than documents

    def add(self, part: Part, counts: dict[str, Any]) -> None:
        """Appends a part, which survives a kill after the next `sync`.

        Args:
            counts: totals over all parts so far.
        """
        # Boundaries count over the store: `self.tokens` tokens come before this part.
        ends = self.tokens + np.cumsum(part.lengths)
        if part.segments is not None:
            self._files[SEGMENTS].add(part.shifted_segments(self.tokens))
        self._files[TOKENS].add(part.tokens.astype(self._dtype, copy=False))
        self._files[DOCUMENTS].add(ends.astype("<i8", copy=False))
        self._files[HASHES].add(part.hashes.astype("<u8", copy=False))
        # The progress changes after all files have been written: if the disk is full, it describes complete parts only.
        files = {name: (file.size, list(file.checksums)) for name, file in self._files.items()}
        self._progress |= {"parts": self.parts + 1, "counts": counts, "files": files}
        if time.monotonic() > self._synced + SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flushes the files to disk, then replaces `progress.json`: in this order it only describes bytes on disk."""
        for file in self._files.values():
            file.sync()
        write_file(self.folder / PROGRESS, json.dumps(self._progress).encode())
        self._synced = time.monotonic()

    def finish(self, vocabulary: Vocabulary, summary: dict[str, Any]) -> Header:
        """Writes the header, and moves the folder to `path`, where it replaces an existing store."""
        self.sync()
        checksums = {name: file.checksums for name, file in self._files.items()}
        dtype_name = self._dtype.newbyteorder("=").name  # without the byte order, as "uint16"
        segment_count = self._files[SEGMENTS].size // SEGMENT.itemsize if SEGMENTS in self._files else 0
        header = Header(dtype_name, self.tokens, self.documents, vocabulary, checksums, summary, segment_count)
        header.write(self.folder)
        put_in_place(self.path)
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # a full disk fails here too, and the last sync stays valid
                self.sync()
        for file in self._files.values():
            file.close()
