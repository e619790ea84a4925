"""The format of `armillary-data prepare`: a folder of plain files, and a header that is written last.

- `tokens.bin`: tokens of all documents, little-endian, each document with its end-of-document token.
- `documents.bin`: int64 [D + 1], boundaries of the documents: 0, end of the first, ..., number of tokens.
- `hashes.bin`: uint64 [D], a hash of each document's text.
- `store.json`: dtype, counts, vocabulary, a summary, and a CRC-32 of every 64 MiB of each `.bin` file (`Header`).
- `tokenizer.json`, `tokenizer_config.json`: the tokenizer, unless it is "bytes".

`StoreWriter` writes a store, `open_folder` maps it into memory, `verify_folder` compares its checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.core.internal import count, file_size, open_file, read_json, write_synced, write_whole
from armillary.data.errors import readable
from armillary.data.store import Index, Integers, TokenStore, Vocabulary

FORMAT = "armillary token store"
VERSION = 1
REMOVED = {
    2: "stores of trees are no longer read: build trees of token sequences with `armillary.data.prefix_tree`, or save "
    "tokens and labels with `datasets`"
}
"""Versions of earlier releases, and what replaces them."""
HEADER, TOKENS, DOCUMENTS, HASHES = "store.json", "tokens.bin", "documents.bin", "hashes.bin"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BLOCK = 2**26
"""Bytes per checksum."""
ON_EVERY_RANK = "every rank must be able to"
"""Advice for files that cannot be read."""


@dataclass(frozen=True)
class Header:
    """Content of `store.json`.

    Args:
        dtype: dtype of the tokens, such as "uint16".
        tokens, documents: number of tokens and number of documents.
        vocabulary: vocabulary of the tokens.
        checksums: for each `.bin` file, a CRC-32 of every block of `BLOCK` bytes.
        summary: begin-of-document token of the preparation, and its `Counts` of documents.
    """

    dtype: str
    tokens: int
    documents: int
    vocabulary: Vocabulary
    checksums: dict[str, list[int]]
    summary: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def token_type(self) -> np.dtype[Any]:
        """Dtype of the tokens in the file, with its byte order."""
        return np.dtype(self.dtype).newbyteorder("<")

    def sizes(self) -> dict[str, int]:
        """Returns the size of each `.bin` file in bytes."""
        return {
            TOKENS: self.tokens * self.token_type.itemsize,
            DOCUMENTS: 8 * (self.documents + 1),
            HASHES: 8 * self.documents,
        }

    def check_sizes(self, folder: Path) -> None:
        for name, expected in self.sizes().items():
            path = folder / name
            with readable(path, f"its header says {expected} bytes"):
                size = file_size(path)
            check_size(path, size, expected, "header")

    @property
    def content(self) -> str:
        """Identity of the tokens: a hash of counts and checksums."""
        # The hashes of texts are left out, so that stores with the same tokens are equal.
        checksums = [self.checksums[name] for name in self.sizes() if name != HASHES]
        return f"{crc32(json.dumps([self.tokens, self.documents, *checksums]).encode()):08x}"

    def write(self, folder: Path) -> None:
        """Writes the header atomically, which makes the folder a store."""
        text = json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1) + "\n"
        write_file(folder / HEADER, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Header:
        path = folder / HEADER
        try:
            values: Any = read_json(path)
            version = (values.pop("format"), values.pop("version"))
            if version == (FORMAT, VERSION):
                header = cls(**values | {"vocabulary": Vocabulary(**values["vocabulary"])})
                header._check()
                return header
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ValueError(f"{path} is not the header of a token store ({error})") from error
        reason = REMOVED.get(version[1]) if version[0] == FORMAT else None
        raise ValueError(
            f"{path} is {version[0]!r} version {version[1]}; {reason or f'this reads {FORMAT!r} version {VERSION}'}"
        )

    def _check(self) -> None:
        """Raises ValueError for a wrong type, range or number of checksums, which JSON does not exclude."""
        vocabulary = self.vocabulary
        counts: dict[str, Any] = {"tokens": self.tokens, "documents": self.documents}
        optional = {"vocabulary.size": vocabulary.size, "vocabulary.end_of_document": vocabulary.end_of_document}
        for name in ("unread", "empty", "binary", "replaced", "skipped"):
            optional[f"summary.{name}"] = self.summary.get(name)
        counts |= {name: value for name, value in optional.items() if value is not None}
        for name, value in counts.items():
            count(name, value)
        if self.token_type.kind not in "iu" or type(vocabulary.tokenizer) not in (str, type(None)):
            raise ValueError(f"dtype={self.dtype!r}, vocabulary.tokenizer={vocabulary.tokenizer!r}")
        for name, size in self.sizes().items():
            if len(self.checksums[name]) != -(-size // BLOCK):
                raise ValueError(f"{len(self.checksums[name])} checksums of the {size} bytes of {name}")


# -- reading ----------------------------------------------------------------------------------------------------------


def open_folder(path: Path) -> TokenStore:
    """Maps the store in a folder into memory. Checks the sizes of its files; `verify_folder` compares checksums."""
    header = Header.read(path)
    header.check_sizes(path)
    tokens, hashes = map_file(path / TOKENS, header.token_type), map_file(path / HASHES, np.dtype("<u8"))
    ends: npt.NDArray[np.int64] = map_file(path / DOCUMENTS, np.dtype("<i8"))
    if ends[0] != 0 or ends[-1] != header.tokens:
        raise ValueError(f"{path / DOCUMENTS} runs from {ends[0]} to {ends[-1]} tokens, not from 0 to {header.tokens}")
    return TokenStore(str(path), [tokens], ends[:-1], ends[1:], header.vocabulary, header.content, hashes)


def verify_folder(path: Path) -> Iterator[int]:
    """Reads all bytes of a store's `.bin` files and compares checksums. Yields the size of each block.

    Raises:
        ValueError: a file with another size than the header's, a block that does not match its checksum, or a token
            outside of the vocabulary. The message names the bytes.
    """
    header = Header.read(path)
    header.check_sizes(path)
    vocab_size = header.vocabulary.size
    for name in header.sizes():
        with readable(path / name, ON_EVERY_RANK), open_file(path / name) as file:
            for i, expected in enumerate(header.checksums[name]):
                block = file.read(BLOCK)
                if crc32(block) != expected:
                    byte_range = f"bytes {i * BLOCK} to {i * BLOCK + len(block) - 1}"
                    raise ValueError(
                        f"{path / name}: {byte_range} do not match their checksum; prepare the store again"
                    )
                if name == TOKENS and vocab_size is not None:
                    tokens = np.frombuffer(block, header.token_type)
                    if tokens.max() >= vocab_size:
                        j = int(np.argmax(tokens >= vocab_size))
                        place = f"token {tokens[j]} at byte {i * BLOCK + j * tokens.itemsize}"
                        raise ValueError(f"{path / name}: {place} is not in the vocabulary of {vocab_size}")
                yield len(block)


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """Tokenized documents, such as the documents of an input chunk.

    Args:
        tokens: the concatenated documents, each with its end-of-document token.
        lengths: int64 [d], number of tokens of each document.
        hashes: uint64 [d], hash of each document's text.
    """

    tokens: Integers
    lengths: Index
    hashes: npt.NDArray[np.uint64]


class StoreWriter:
    """Appends parts to the files of a store in an empty folder; `finish` writes its header."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.folder, self._dtype = folder, dtype.newbyteorder("<")
        self.tokens, self.documents = 0, 0
        self._files = {name: BlockFile(folder / name) for name in (TOKENS, DOCUMENTS, HASHES)}
        self._files[DOCUMENTS].add(np.zeros(1, "<i8"))  # the first document starts at token 0

    def add(self, part: Part) -> None:
        # Boundaries count over the store: `self.tokens` tokens come before this part.
        ends = self.tokens + np.cumsum(part.lengths)
        self._files[TOKENS].add(part.tokens.astype(self._dtype, copy=False))
        self._files[DOCUMENTS].add(ends.astype("<i8", copy=False))
        self._files[HASHES].add(part.hashes.astype("<u8", copy=False))
        self.tokens, self.documents = self.tokens + len(part.tokens), self.documents + len(part.lengths)

    def finish(self, vocabulary: Vocabulary, summary: dict[str, Any]) -> Header:
        for file in self._files.values():
            file.sync()
        checksums = {name: file.checksums for name, file in self._files.items()}
        dtype_name = self._dtype.newbyteorder("=").name  # without the byte order, as "uint16"
        header = Header(dtype_name, self.tokens, self.documents, vocabulary, checksums, summary)
        header.write(self.folder)
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class BlockFile:
    """A new file with a CRC-32 of every `BLOCK` bytes."""

    def __init__(self, path: Path) -> None:
        self.checksums, self._size = list[int](), 0
        self._file = path.open("wb", buffering=0)

    def add(self, array: npt.NDArray[Any]) -> None:
        data = array.view(np.uint8).data
        while data:
            # Writes at most to the end of the block, so that each write belongs to one checksum.
            written_bytes = self._file.write(data[: BLOCK - self._size % BLOCK])
            if self._size % BLOCK == 0:
                self.checksums.append(0)
            self.checksums[-1] = crc32(data[:written_bytes], self.checksums[-1])
            self._size, data = self._size + written_bytes, data[written_bytes:]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


# -- files ------------------------------------------------------------------------------------------------------------


def is_folder(path: Path) -> bool:
    return (path / HEADER).is_file()


def partial_folder(path: Path) -> Path:
    return Path(f"{path}.partial")  # with_name would refuse "." and "/"


def write_file(path: Path, data: bytes) -> None:
    # Its bytes are on disk before it has its name.
    write_whole(path, lambda partial: write_synced(partial, [data]))


def check_size(path: Path, size: int, expected: int, source: str) -> None:
    """Raises ValueError unless a file has the size that `source`, its "header" or its "index", records."""
    if size < expected:
        raise ValueError(f"{path} is cut off at byte {size}; its {source} says {expected} bytes")
    if size > expected:
        raise ValueError(f"{path} has {size} bytes; its {source} says {expected} bytes")


def map_file(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    with open_file(path) as file:
        is_empty = not os.fstat(file.fileno()).st_size  # empty files cannot be mapped
        return np.empty(0, dtype) if is_empty else np.memmap(file, dtype, "r")
