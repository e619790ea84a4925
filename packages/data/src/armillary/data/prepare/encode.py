"""Tokenization of one chunk of the input, in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from armillary.data.formats.folder import TOKENIZER, TOKENIZER_CONFIG
from armillary.data.prepare.sources import InputChunk, Invalid, documents
from armillary.data.prepare.writer import Part
from armillary.data.shuffle import stable_hash
from armillary.data.store import Integers, token_dtype
from armillary.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import TextTokenizer, decode_utf8

OnInvalid = Literal["refuse", "replace", "skip"]
"""Policy for text that is not UTF-8: stop, replace it by U+FFFD, or skip the document. Broken records have no text to
replace, so they are refused unless the policy is "skip"."""

BATCH_BYTES = 2**20
"""Bytes of text to encode at a time: the library's result takes a hundred times as much memory."""


@dataclass
class Counts:
    """Number of documents by outcome, and the names of the first ones that were replaced or skipped."""

    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    binary: int = 0
    replaced: int = 0
    skipped: int = 0
    first_replaced: str | None = None
    first_skipped: str | None = None

    def add(self, later: Counts) -> None:
        """Adds the counts of a later chunk."""
        # The first name stays; numbers add up.
        for name in (entry.name for entry in fields(self)):
            value, addend = getattr(self, name), getattr(later, name)
            setattr(self, name, value or addend if name.startswith("first") else value + addend)


@dataclass(frozen=True)
class Encoder:
    """Tokenizes chunks with the tokenizer in a folder; without a `tokenizer.json`, tokens are bytes."""

    folder: Path
    invalid: OnInvalid

    def __call__(self, chunk: InputChunk) -> tuple[Part, Counts]:
        """Returns the tokens of a chunk's documents.

        Raises:
            ValueError: a file that can no longer be read, or a document that the policy refuses.
        """
        tokenizer, counts = tokenizer_in(self.folder), Counts()
        encoded_parts, batch, size = list[Part](), list[Document](), 0
        for document in documents(chunk):
            if not isinstance(document, Invalid) and self._accept(document, tokenizer, counts):
                batch.append(document)
                size += len(document.text)
            elif isinstance(document, Invalid) and document.binary:
                counts.binary += 1
            elif isinstance(document, Invalid):
                self.skip(document, counts)
            if size >= BATCH_BYTES:  # bounds the memory of the library's result
                encoded_parts.append(self.encode(batch, tokenizer, counts))
                batch, size = [], 0
        return Part.concatenate([*encoded_parts, self.encode(batch, tokenizer, counts)]), counts

    def encode(self, batch: Sequence[Document], tokenizer: Tokenizer, counts: Counts) -> Part:
        """Returns the tokens of some documents, each followed by its end of document."""
        counts.documents += len(batch)
        counts.text_bytes += sum(len(document.text) for document in batch)
        texts, dtype = [document.text for document in batch], token_dtype(tokenizer.vocab_size)
        end, token_arrays = np.array([tokenizer.end_of_document], dtype), encode_all(texts, tokenizer)
        tokens = np.concatenate([np.empty(0, dtype), *(array for tokens in token_arrays for array in (tokens, end))])
        lengths = np.array([len(tokens) + 1 for tokens in token_arrays], np.int64)
        return Part(tokens, lengths, np.array([*map(stable_hash, texts)], np.uint64))

    def _accept(self, document: Document, tokenizer: Tokenizer, counts: Counts) -> bool:
        """Applies the policy to a document, and counts it if it is skipped or changed. Returns True to encode it."""
        if not document.text:
            counts.empty += 1
            return False
        # Byte tokens need no valid UTF-8.
        if not isinstance(tokenizer, ByteTokenizer) and decode_utf8(document.text)[1]:
            if self.invalid != "replace":
                self.skip(Invalid(document.name, "it is not valid UTF-8"), counts)
                return False
            counts.replaced, counts.first_replaced = counts.replaced + 1, counts.first_replaced or document.name
        return True

    def skip(self, record: Invalid, counts: Counts) -> None:
        """Counts a record as skipped.

        Raises:
            ValueError: the policy is not to skip.
        """
        if self.invalid != "skip":
            remedy = "correct it, or skip such documents with --invalid skip; then start over with --overwrite"
            raise ValueError(f"{record.name}: {record.reason}; {remedy}")
        counts.skipped, counts.first_skipped = counts.skipped + 1, counts.first_skipped or record.name


def tokenizer_in(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a store, complete or not; built once per process."""
    files = folder / TOKENIZER, folder / TOKENIZER_CONFIG
    return _build(folder, *(file.read_bytes() for file in files)) if files[0].exists() else ByteTokenizer()


@lru_cache(maxsize=1)
def _build(folder: Path, definition: bytes, config: bytes) -> Tokenizer:
    """Reads a tokenizer. The content of its files is part of the key: the folder may have had another store before."""
    return TextTokenizer.read(folder)


def encode_all(texts: Sequence[bytes], tokenizer: Tokenizer) -> list[Integers]:
    """Returns the tokens of each text, in the dtype of stores."""
    if isinstance(tokenizer, TextTokenizer):
        return list(tokenizer.encode_all([decode_utf8(text)[0] for text in texts]))
    return [tokenizer.encode(text).numpy().astype(token_dtype(tokenizer.vocab_size)) for text in texts]
