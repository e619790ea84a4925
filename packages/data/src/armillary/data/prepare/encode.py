"""One chunk of the input as tokens: what a worker process does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from armillary.data.formats.folder import TOKENIZER, TOKENIZER_CONFIG
from armillary.data.prepare.sources import InputChunk, Invalid, documents
from armillary.data.prepare.writer import Part
from armillary.data.shuffle import stable_hash
from armillary.data.store import Integers
from armillary.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import TextTokenizer, decoded

OnInvalid = Literal["refuse", "replace", "skip"]
"""What to do with text that is not UTF-8: stop, put U+FFFD in its place, or leave the document out. Broken records give
no document at all, so they are left out under "skip" and refused otherwise."""

AT_ONCE = 2**20
"""Bytes of text that are encoded together: as tokens of the library they take a hundred times as much."""


@dataclass
class Counts:
    """What became of the documents of some chunks; `first_*` name the first of a kind."""

    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    binary: int = 0
    replaced: int = 0
    skipped: int = 0
    first_replaced: str | None = None
    first_skipped: str | None = None

    def add(self, other: Counts) -> None:
        for name in (entry.name for entry in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, mine or theirs if name.startswith("first") else mine + theirs)


@dataclass(frozen=True)
class Encoder:
    """Turns chunks into tokens, with the tokenizer in a folder; without a `tokenizer.json` there, bytes are tokens."""

    folder: Path
    invalid: OnInvalid

    def __call__(self, chunk: InputChunk) -> Encoded:
        """
        Raises:
            ValueError: a file that cannot be read any more, or a document that `invalid` does not let pass.
        """
        tokenizer, found = tokenizer_in(self.folder), Encoded()
        for kept in batches(self.kept(chunk, tokenizer, found.counts)):
            texts = [document.text for document in kept]
            found.tokens += encode_all(texts, tokenizer)
            found.hashes += map(stable_hash, texts)
        return found

    def kept(self, chunk: InputChunk, tokenizer: Tokenizer, counts: Counts) -> Iterator[Document]:
        """The documents to keep."""
        for document in documents(chunk):
            if isinstance(document, Invalid) and document.binary:
                counts.binary += 1
            elif isinstance(document, Invalid):
                self.skip(document, counts)
            elif not document.text:
                counts.empty += 1
            elif self._is_kept(document, tokenizer, counts):
                counts.documents, counts.text_bytes = counts.documents + 1, counts.text_bytes + len(document.text)
                yield document

    def skip(self, found: Invalid, counts: Counts) -> None:
        """Passes over a record, or refuses it."""
        self._refuse_unless(self.invalid == "skip", found)
        counts.skipped, counts.first_skipped = counts.skipped + 1, counts.first_skipped or found.name

    def _is_kept(self, document: Document, tokenizer: Tokenizer, counts: Counts) -> bool:
        if isinstance(tokenizer, ByteTokenizer) or not decoded(document.text)[1]:
            return True
        self._refuse_unless(self.invalid != "refuse", Invalid(document.name, "it is not valid UTF-8"))
        if self.invalid == "skip":
            counts.skipped, counts.first_skipped = counts.skipped + 1, counts.first_skipped or document.name
            return False
        counts.replaced, counts.first_replaced = counts.replaced + 1, counts.first_replaced or document.name
        return True

    def _refuse_unless(self, allowed: bool, found: Invalid) -> None:
        if not allowed:
            ways = "mend it, or leave such documents out with --invalid skip; then start over with --overwrite"
            raise ValueError(f"{found.name}: {found.reason}; {ways}")


@dataclass
class Encoded:
    """Tokens and hashes of each document of a chunk, and counts."""

    tokens: list[Integers] = field(default_factory=list[Integers])
    hashes: list[int] = field(default_factory=list[int])
    counts: Counts = field(default_factory=Counts)

    def part(self, end_of_document: int, dtype: np.dtype[np.unsignedinteger]) -> Part:
        """All of them joined, each with its end of document."""
        lengths = np.array([len(tokens) + 1 for tokens in self.tokens], np.int64)
        end = np.array([end_of_document], dtype)
        joined = np.concatenate([np.empty(0, dtype), *(part for tokens in self.tokens for part in (tokens, end))])
        return Part(joined.astype(dtype, copy=False), lengths, np.array(self.hashes, np.uint64))


def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer of a store, finished or not, built once in each process."""
    files = folder / TOKENIZER, folder / TOKENIZER_CONFIG
    return _built(folder, *(file.read_bytes() for file in files)) if files[0].exists() else ByteTokenizer()


@lru_cache(maxsize=1)
def _built(folder: Path, definition: bytes, config: bytes) -> Tokenizer:
    """The tokenizer of a folder with these files; another store may have been in it before."""
    return TextTokenizer.read(folder)


def encode_all(texts: Sequence[bytes], tokenizer: Tokenizer) -> list[Integers]:
    if isinstance(tokenizer, TextTokenizer):
        return list(tokenizer.encode_all([decoded(text)[0] for text in texts]))
    return [tokenizer.encode(text).numpy() for text in texts]


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Some documents at a time, of about `AT_ONCE` bytes together."""
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    yield batch
