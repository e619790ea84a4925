"""Whatever tokens or text lie at a path, as a `TokenStore`, and their tokenizer."""

from __future__ import annotations

from pathlib import Path

from armillary.data.formats import is_store, open_store
from armillary.data.formats.folder import Header, is_folder
from armillary.data.store import TokenStore
from armillary.data.text.byte_tokenizer import ByteTokenizer
from armillary.data.text.corpus import binary, read_documents
from armillary.data.text.tokenizer import TextTokenizer
from armillary.data.text.unfolding import KnownTokenizer

PACKED = {".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", ".bin", ".idx"}
"""Suffixes of files that hold more than their text."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files by which a Hugging Face folder has a tokenizer; the first alone can be read."""


def open_tokens(path: Path, folder: Path | None = None) -> TokenStore:
    """A store, or text as tokens of a Hugging Face folder's tokenizer, or bytes.

    Raises:
        ValueError: files that are neither, as far as their names tell; a store of bytes for a folder with a tokenizer.
    """
    if is_store(path):
        store = open_store(path)
        if store.vocabulary.tokenizer == ByteTokenizer().identity and has_tokenizer(folder):
            raise ValueError(
                f"{store.name} holds bytes, and the model in {folder} knows other tokens; prepare it again with "
                f"`armillary-data prepare --tokenizer {folder}`"
            )
        return store
    if path.suffix in PACKED or (path / "tokens.bin").exists():
        raise ValueError(
            f"{path} is no text to be read as it is; make a token store of it with `armillary-data prepare`"
        )
    documents = read_documents(path)
    if path.is_file() and (reason := binary(documents[0].text)) is not None:
        raise ValueError(f"{path} is no text to be read as it is: {reason}")
    return TokenStore.of(documents, folder_tokenizer(folder), str(path))


def folder_tokenizer(folder: Path | None) -> KnownTokenizer:
    """The tokenizer of a Hugging Face folder; bytes where there is no folder, or none in it.

    Raises:
        ValueError: it is not a tokenizer.json, or the library that reads it is missing.
    """
    return ByteTokenizer() if folder is None or not has_tokenizer(folder) else text_tokenizer(folder)


def read_tokenizer(path: Path, begin_of_document: str | None = None) -> KnownTokenizer:
    """The tokenizer of a file, or of a folder as `folder_tokenizer` has it.

    Args:
        begin_of_document: name of a token in front of each text; by default as the tokenizer's files say.

    Raises:
        ValueError: likewise.
    """
    if begin_of_document is None and path.is_dir():
        return folder_tokenizer(path)
    return text_tokenizer(path, begin_of_document)


def text_tokenizer(path: Path, begin_of_document: str | None = None) -> TextTokenizer:
    """That of a file or folder that has one."""
    try:
        return TextTokenizer.read(path, begin_of_document=begin_of_document)
    except ImportError as error:
        where = "in" if path.is_dir() else "at"
        raise ValueError(f"the tokenizer {where} {path} cannot be read: {error}") from error


def tokenizer_of(path: Path, begin_of_document: str | None = None) -> KnownTokenizer | None:
    """The tokenizer that made the tokens at a path, or would make them of its text; None where its files do not say."""
    if is_folder(path):
        if has_tokenizer(path):
            return read_tokenizer(path, begin_of_document)
        return ByteTokenizer() if Header.read(path).vocabulary.tokenizer == ByteTokenizer().identity else None
    return ByteTokenizer() if path.exists() and path.suffix not in (".bin", ".idx", ".arrow") else None


def has_tokenizer(folder: Path | None) -> bool:
    return folder is not None and any((folder / name).exists() for name in TOKENIZERS)
