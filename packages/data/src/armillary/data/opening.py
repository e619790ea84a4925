"""Whatever tokens or text lie at a path, as a `TokenStore`."""

from __future__ import annotations

from pathlib import Path

from armillary.data.formats import is_store, open_store
from armillary.data.store import TokenStore
from armillary.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from armillary.data.text.corpus import binary, read_documents
from armillary.data.text.tokenizer import TextTokenizer

PACKED = {".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", ".bin", ".idx"}
"""Suffixes of files that hold more than their text."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files by which a Hugging Face folder has a tokenizer; the first alone can be read."""


def open_tokens(path: Path, folder: Path | None = None) -> TokenStore:
    """A store, or text as tokens of a Hugging Face folder's tokenizer, or bytes.

    Raises:
        ValueError: files that are neither, as far as their names tell.
    """
    if is_store(path):
        return open_store(path)
    if path.suffix in PACKED or (path / "tokens.bin").exists():
        raise ValueError(
            f"{path} is no text to be read as it is; make a token store of it with `armillary-data prepare`"
        )
    documents = read_documents(path)
    if path.is_file() and (reason := binary(documents[0].text)) is not None:
        raise ValueError(f"{path} is no text to be read as it is: {reason}")
    return TokenStore.of(documents, folder_tokenizer(folder), str(path))


def folder_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; bytes where there is no folder, or none in it.

    Raises:
        ValueError: it is not a tokenizer.json, or the library that reads it is missing.
    """
    if folder is None or not has_tokenizer(folder):
        return ByteTokenizer()
    try:
        return TextTokenizer.read(folder)
    except ImportError as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error


def has_tokenizer(folder: Path | None) -> bool:
    return folder is not None and any((folder / name).exists() for name in TOKENIZERS)
