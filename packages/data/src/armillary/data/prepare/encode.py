"""Tokenization of one chunk of the input, in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from armillary.core.files import read_file
from armillary.data.formats.folder import TOKENIZER, TOKENIZER_CONFIG
from armillary.data.prepare.sources import InputChunk, Invalid, documents
from armillary.data.prepare.writer import Part
from armillary.data.shuffle import stable_hash
from armillary.data.store import Integers, token_dtype
from armillary.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from armillary.data.text.corpus import Document
from armillary.data.text.tokenizer import TextTokenizer, decode_utf8

OnInvalid = Literal["refuse", "replace", "skip"]
"""Policy for text that is not UTF-8: stop, replace invalid bytes by U+FFFD, or skip the document. Broken records have
no text to replace: "skip" skips them, and both other policies refuse them."""

BATCH_BYTES = 2**20
"""Bytes of text to encode at a time: the result of the `tokenizers` library takes a hundred times as much memory."""


@dataclass
class Counts:
    """Number of documents by outcome, bytes of text, and the names of the first replaced and the first skipped one."""

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
        for name in (entry.name for entry in fields(self)):
            value, later_value = getattr(self, name), getattr(later, name)
            # Counts are added. The name of the first document is that of this chunk if it has one, else the later one.
            setattr(self, name, value or later_value if name.startswith("first") else value + later_value)


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
        encoded_parts, batch, batch_bytes = list[Part](), list[Document](), 0
        for document in documents(chunk):
            if not isinstance(document, Invalid) and self._accept(document, tokenizer, counts):
                batch.append(document)
                batch_bytes += len(document.text)
            elif isinstance(document, Invalid) and document.binary:
                counts.binary += 1
            elif isinstance(document, Invalid):
                self.skip(document, counts)
            if batch_bytes >= BATCH_BYTES:
                encoded_parts.append(self.encode(batch, tokenizer, counts))
                batch, batch_bytes = [], 0
        return Part.concatenate([*encoded_parts, self.encode(batch, tokenizer, counts)]), counts

    def encode(self, batch: Sequence[Document], tokenizer: Tokenizer, counts: Counts) -> Part:
        """Returns the tokens of some documents, with an end-of-document token after each."""
        counts.documents += len(batch)
        counts.text_bytes += sum(len(document.text) for document in batch)
        texts, dtype = [document.text for document in batch], token_dtype(tokenizer.vocab_size)
        end, token_arrays = np.array([tokenizer.end_of_document], dtype), encode_all(texts, tokenizer)
        arrays = [np.empty(0, dtype)]  # a batch may be empty, and `concatenate` needs an array
        for tokens in token_arrays:
            arrays += [tokens, end]
        lengths = np.array([len(tokens) + 1 for tokens in token_arrays], np.int64)
        return Part(np.concatenate(arrays), lengths, np.array([*map(stable_hash, texts)], np.uint64))

    def _accept(self, document: Document, tokenizer: Tokenizer, counts: Counts) -> bool:
        """Returns True if a document is to be encoded. Counts it if it is empty, skipped, or has replaced bytes."""
        if not document.text:
            counts.empty += 1
            return False
        # A byte tokenizer encodes any bytes; other tokenizers encode text, which must be valid UTF-8.
        if not isinstance(tokenizer, ByteTokenizer) and decode_utf8(document.text)[1]:
            if self.invalid != "replace":
                self.skip(Invalid(document.name, "it is not valid UTF-8"), counts)
                return False
            counts.replaced, counts.first_replaced = counts.replaced + 1, counts.first_replaced or document.name
        return True

    def skip(self, record: Invalid, counts: Counts) -> None:
        """Counts a record as skipped.

        Raises:
            ValueError: the policy is not "skip".
        """
        if self.invalid != "skip":
            remedy = "correct it, or skip such documents with --invalid skip; then start over with --overwrite"
            raise ValueError(f"{record.name}: {record.reason}; {remedy}")
        counts.skipped, counts.first_skipped = counts.skipped + 1, counts.first_skipped or record.name


def tokenizer_in(folder: Path) -> Tokenizer:
    """Returns the tokenizer in the folder of a store; the last one is cached."""
    files = folder / TOKENIZER, folder / TOKENIZER_CONFIG
    return _build(folder, *map(read_file, files)) if files[0].exists() else ByteTokenizer()


@lru_cache(maxsize=1)
def _build(folder: Path, definition: bytes, config: bytes) -> Tokenizer:
    """Reads the tokenizer of a folder.

    The content of its files is an argument only to be part of the cache's key: the same folder may have had another
    store before.
    """
    return TextTokenizer.read(folder)


def encode_all(texts: Sequence[bytes], tokenizer: Tokenizer) -> list[Integers]:
    """Returns the tokens of each text, in the dtype of stores."""
    if isinstance(tokenizer, TextTokenizer):
        return list(tokenizer.encode_all([decode_utf8(text)[0] for text in texts]))
    return [tokenizer.encode(text).numpy().astype(token_dtype(tokenizer.vocab_size)) for text in texts]
