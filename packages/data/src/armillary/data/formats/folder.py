"""Our own format: a folder of plain files and a header, which is written last.

- `tokens.bin`: all tokens, little-endian, one document after the other, each with its end of document.
- `documents.bin`: int64 [D + 1], the tokens before each document, and before the end.
- `hashes.bin`: uint64 [D], a hash of each document's text.
- `segments.bin`: where documents are trees, their segments (`armillary.data.trees.SEGMENT`), 24 bytes each.
- `store.json`: what the tokens mean, the sizes of the files, and a CRC-32 of every 64 MiB of them.
- `tokenizer.json`, `tokenizer_config.json`: the tokenizer, where it has such files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from armillary.core.checked import integer
from armillary.core.files import parse_json
from armillary.data.store import TokenStore, Vocabulary
from armillary.data.trees import SEGMENT, SegmentTable

FORMAT = "armillary token store"
VERSIONS = {False: 1, True: 2}
"""Of stores without trees and with them, so that code which knows no trees refuses those."""
HEADER, TOKENS, DOCUMENTS, HASHES = "store.json", "tokens.bin", "documents.bin", "hashes.bin"
SEGMENTS = "segments.bin"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BLOCK = 2**26
"""Bytes that one checksum is of."""


@dataclass(frozen=True)
class Header:
    """`store.json`.

    Args:
        dtype: of tokens, such as "uint16".
        tokens, documents: how many.
        vocabulary: of the tokens.
        checksums: for each file, a CRC-32 of each of its blocks of `BLOCK` bytes.
        summary: what was read and left out when it was made; for people.
        segments: of trees, all together; 0 where documents are none.
    """

    dtype: str
    tokens: int
    documents: int
    vocabulary: Vocabulary
    checksums: dict[str, list[int]]
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    segments: int = 0

    @property
    def token_type(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            TOKENS: self.tokens * self.token_type.itemsize,
            DOCUMENTS: 8 * (self.documents + 1),
            HASHES: 8 * self.documents,
            **({SEGMENTS: SEGMENT.itemsize * self.segments} if self.segments else {}),
        }

    @property
    def content(self) -> str:
        """Tells these tokens from others."""
        sums = [self.checksums[name] for name in self.sizes() if name != HASHES]
        return f"{crc32(json.dumps([self.tokens, self.documents, *sums]).encode()):08x}"

    def write(self, folder: Path) -> None:
        """Puts the header into the folder, on disk before this returns: from now on it is a store."""
        values = asdict(self)
        if not self.segments:
            del values["segments"]
        text = json.dumps({"format": FORMAT, "version": VERSIONS[self.segments > 0]} | values, indent=1) + "\n"
        write_file(folder / HEADER, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Header:
        """The header of a folder.

        Raises:
            ValueError: not one of ours, or of a version that this code does not know.
        """
        path = folder / HEADER
        try:
            values = parse_json(path.read_text())
            version = (values.pop("format"), values.pop("version"))
            if version == (FORMAT, VERSIONS["segments" in values]):
                return cls(**values | {"vocabulary": Vocabulary(**values["vocabulary"])})._checked()
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ValueError(f"{path} is not the header of a token store ({error})") from error
        raise ValueError(f"{path} is {version[0]!r} version {version[1]}; this reads {FORMAT!r} version 1 or 2")

    def _checked(self) -> Header:
        """Returns itself. JSON may hold anything, so a value of another type raises an error that `read` catches."""
        known, left_out = self.vocabulary, ("empty", "binary", "replaced", "skipped")
        counts: dict[str, Any] = {"tokens": self.tokens, "documents": self.documents, "segments": self.segments}
        optional = {"vocabulary.size": known.size, "vocabulary.end_of_document": known.end_of_document}
        optional |= {f"summary.{name}": self.summary.get(name) for name in left_out}
        for name, value in (counts | {n: x for n, x in optional.items() if x is not None}).items():
            integer(name, value, 0)
        if self.token_type.kind not in "iu" or type(known.tokenizer) not in (str, type(None)):
            raise ValueError(f"dtype={self.dtype!r}, vocabulary.tokenizer={known.tokenizer!r}")
        for name, size in self.sizes().items():
            if len(self.checksums[name]) != -(-size // BLOCK):
                raise ValueError(f"{len(self.checksums[name])} checksums of the {size} bytes of {name}")
        return self


@contextmanager
def reading(path: Path) -> Generator[None, None, None]:
    """Makes a ValueError that names the file of every OSError inside."""
    try:
        yield
    except OSError as error:
        name = error.filename or path
        raise ValueError(f"{name} cannot be read ({error.strerror or error}); every rank must be able to") from error


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all; it is on disk before this returns."""
    partial = path.with_name(path.name + ".new")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def partial_folder(path: Path) -> Path:
    """Where a store is until it is complete."""
    return Path(f"{path}.partial")  # with_name would refuse "." and "/"


def is_folder(path: Path) -> bool:
    return (path / HEADER).is_file()


def open_folder(path: Path) -> TokenStore:
    """The store in a folder. Its sizes and index are checked, its checksums are not: see `verify_folder`.

    Raises:
        ValueError: a header that is not ours, a file missing, cut short or too long, an index that falls.
    """
    header = Header.read(path)
    for name, size in header.sizes().items():
        _check_size(path / name, size)
    tokens = _mapped(path / TOKENS, header.token_type)
    ends: npt.NDArray[np.int64] = _mapped(path / DOCUMENTS, np.dtype("<i8"))
    hashes = _mapped(path / HASHES, np.dtype("<u8"))
    if ends[0] != 0 or ends[-1] != header.tokens:
        raise ValueError(f"{path / DOCUMENTS} runs from {ends[0]} to {ends[-1]} tokens, not from 0 to {header.tokens}")
    trees = SegmentTable(str(path / SEGMENTS), _mapped(path / SEGMENTS, SEGMENT)) if header.segments else None
    return TokenStore(str(path), [tokens], ends[:-1], ends[1:], header.vocabulary, header.content, hashes, trees)


def verify_folder(path: Path) -> Iterator[int]:
    """Reads every byte of a store and compares checksums; yields the bytes done after each block.

    Raises:
        ValueError: the first block that is not what was written, by its bytes, or a token outside of the vocabulary.
    """
    header = Header.read(path)
    for name, size in header.sizes().items():
        _check_size(path / name, size)
        with reading(path / name), (path / name).open("rb") as file:
            for i, expected in enumerate(header.checksums[name]):
                block = file.read(BLOCK)
                if crc32(block) != expected:
                    place = f"bytes {i * BLOCK} to {i * BLOCK + len(block) - 1}"
                    raise ValueError(f"{path / name}: {place} are not what was written; prepare the store again")
                if name == TOKENS:
                    _check_tokens(path / name, np.frombuffer(block, header.token_type), i, header.vocabulary.size)
                yield len(block)


def _check_tokens(path: Path, tokens: npt.NDArray[Any], block: int, size: int | None) -> None:
    if size is not None and tokens.max() >= size:
        i = int(np.argmax(tokens >= size))
        byte = block * BLOCK + i * tokens.itemsize
        raise ValueError(f"{path}: token {tokens[i]} at byte {byte} is not in the vocabulary of {size}")


def _check_size(path: Path, expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); a store has it with {expected} bytes") from error
    if found < expected:
        raise ValueError(f"{path} is cut off at byte {found}; its header says {expected} bytes")
    if found > expected:
        raise ValueError(f"{path} holds something else from byte {expected} on, to byte {found}; its header ends there")


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # nothing cannot be mapped
