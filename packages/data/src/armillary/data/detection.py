"""Opens what a user's path names: a store in one of the formats, text to tokenize, or a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from armillary.data.errors import readable
from armillary.data.formats.foreign import is_arrow, megatron_prefix, open_arrow, open_megatron
from armillary.data.formats.store_folder import ON_EVERY_RANK, Header, is_folder, open_folder, partial_folder
from armillary.data.store import TokenStore
from armillary.data.text.corpus import binary, json_records, read_documents
from armillary.data.text.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer, TwoWayTokenizer

CONTAINERS = {".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", ".bin", ".idx"}
"""Suffixes of files whose bytes are not the text itself."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files by which a folder with a tokenizer is recognized; only a tokenizer.json can be read."""


def open_store(
    path: str | os.PathLike[str], tokenizer: Tokenizer | None = None, *, column: str = "input_ids"
) -> TokenStore:
    """Maps a store into memory.

    Args:
        path: a folder made by `armillary-data prepare` or saved by Hugging Face `datasets`, or Megatron's `path.bin`
            and `path.idx` (the path of either, or without suffix). If the rows of a `datasets` folder have lists named
            "labels", these are the labels of their tokens, with -100 for tokens without one.
        tokenizer: refuse a store whose files name another tokenizer.
        column: column of a `datasets` folder with lists of tokens.

    Raises:
        ValueError: not a store, or an unfinished one; a file that cannot be read, is cut off, too long or of another
            format; a `datasets` folder with several splits or without such a column; or another tokenizer.
        ImportError: the folder was saved by `datasets`, which is not installed.
    """
    path = Path(path)
    with readable(path, ON_EVERY_RANK):
        if is_folder(path):
            store = open_folder(path)
        elif prefix := megatron_prefix(path):
            store = open_megatron(prefix)
        elif is_arrow(path):
            store = open_arrow(path, column)
        elif (partial := partial_folder(path)).is_dir():
            raise ValueError(f"{path} is not finished ({partial}); run the same `armillary-data prepare` again")
        else:
            accepted_formats = (
                "a folder made by `armillary-data prepare`, a Megatron .bin/.idx pair, or a saved `datasets` folder"
            )
            raise ValueError(
                f"{path} {'holds no tokens' if path.exists() else 'does not exist'}; give {accepted_formats}"
            )
    identity = store.vocabulary.tokenizer
    if tokenizer is not None and identity is not None and identity != tokenizer.identity:
        raise ValueError(
            f"{path} has tokens of tokenizer {identity}, not of {tokenizer.identity}; prepare it again or use its own "
            "tokenizer"
        )
    return store


def is_store(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path looks like a store for `open_store`, or an unfinished one of `armillary-data prepare`.

    Raises:
        ValueError: the path cannot be read.
    """
    path = Path(path)
    with readable(path, ON_EVERY_RANK):
        return is_folder(path) or megatron_prefix(path) is not None or is_arrow(path) or partial_folder(path).is_dir()


def open_tokens(path: Path, model_folder: Path | None = None) -> TokenStore:
    """Opens a store, or tokenizes text files in memory with the tokenizer of a model, by default as bytes.

    Args:
        model_folder: Hugging Face folder of the model.

    Raises:
        ValueError: the path is neither a store nor text, judging by its name and content; it or the tokenizer cannot be
            read; or it is a store of bytes, and the model's folder has a tokenizer.
        ImportError: the folder was saved by `datasets`, which is not installed.
    """
    if is_store(path):
        store = open_store(path)
        if store.vocabulary.tokenizer == ByteTokenizer().identity and has_tokenizer(model_folder):
            raise ValueError(
                f"{store.name} holds bytes, and the model in {model_folder} has a tokenizer; prepare it again with "
                f"`armillary-data prepare --tokenizer {model_folder}`"
            )
        return store
    documents = [] if path.suffix in CONTAINERS or (path / "tokens.bin").exists() else read_documents(path)
    if not documents or (path.suffix == ".json" and json_records(documents[0].text)):
        raise ValueError(
            f"{path} is no text to be read as it is; make a token store of it with `armillary-data prepare`"
        )
    if path.is_file() and (reason := binary(documents[0].text)) is not None:
        raise ValueError(f"{path} is no text to be read as it is: {reason}")
    return TokenStore.of(documents, read_tokenizer(model_folder), str(path))


def read_tokenizer(path: Path | None, begin_of_document: str | None = None) -> TwoWayTokenizer:
    """Reads the tokenizer of a file or Hugging Face folder; of None, or a folder without one, a `ByteTokenizer`.

    Raises:
        ValueError: not a tokenizer.json, another file that cannot be read, or the library for it is not installed.
    """
    if path is None or (begin_of_document is None and path.is_dir() and not has_tokenizer(path)):
        return ByteTokenizer()
    try:
        return TextTokenizer.read(path, begin_of_document=begin_of_document)
    except ImportError as error:
        preposition = "in" if path.is_dir() else "at"
        raise ValueError(f"the tokenizer {preposition} {path} cannot be read: {error}") from error


def tokenizer_of(path: Path, begin_of_document: str | None = None) -> TwoWayTokenizer:
    """Returns the tokenizer of a store, or a `ByteTokenizer` for text. Raises ValueError if the store lacks its own."""
    if not path.exists() and not is_store(path):
        raise ValueError(f"{path} does not exist")
    if is_folder(path):
        if has_tokenizer(path):
            return read_tokenizer(path, begin_of_document)
        is_bytes = Header.read(path).vocabulary.tokenizer == ByteTokenizer().identity
    else:  # files of Megatron and `datasets` do not name their tokenizer
        is_bytes = not is_store(path) and path.suffix not in CONTAINERS
    if not is_bytes:
        raise ValueError(f"{path} does not have its tokenizer")
    return ByteTokenizer()


def has_tokenizer(folder: Path | None) -> bool:
    return folder is not None and any((folder / name).exists() for name in TOKENIZER_FILES)
