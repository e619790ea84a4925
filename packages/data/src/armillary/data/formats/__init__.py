"""Files that hold tokens, opened as one `TokenStore`."""

from __future__ import annotations

import os
from pathlib import Path

from armillary.data.formats.arrow import is_arrow, open_arrow
from armillary.data.formats.folder import is_folder, open_folder, partial_folder, reading, verify_folder
from armillary.data.formats.megatron import megatron_prefix, open_megatron
from armillary.data.store import TokenStore, check_tokenizer
from armillary.data.text.byte_tokenizer import Tokenizer

__all__ = ["is_store", "open_store", "verify_folder"]


def open_store(
    path: str | os.PathLike[str], tokenizer: Tokenizer | None = None, *, column: str = "input_ids"
) -> TokenStore:
    """The tokens at `path`, mapped into memory: a folder made by `armillary-data prepare`, Megatron's `path.bin` and
    `path.idx` (the path of either, or without suffix), or a folder saved by Hugging Face `datasets`.

    Args:
        tokenizer: refuse a store that another one made.
        column: lists of tokens in a `datasets` folder.

    Raises:
        ValueError: not a store, files that may not be read, are cut short or have foreign content, naming the byte, or
            another tokenizer.
    """
    path = Path(path)
    with reading(path):
        if is_folder(path):
            store = open_folder(path)
        elif prefix := megatron_prefix(path):
            store = open_megatron(prefix)
        elif is_arrow(path):
            store = open_arrow(path, column)
        else:
            raise ValueError(_missing(path))
    if tokenizer is not None:
        check_tokenizer(store, tokenizer)
    return store


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether `open_store` would know what to do with the path, or with what `prepare` has begun to write there."""
    path = Path(path)
    with reading(path):
        return is_folder(path) or megatron_prefix(path) is not None or is_arrow(path) or partial_folder(path).is_dir()


def _missing(path: Path) -> str:
    accepted = "give a folder made by `armillary-data prepare`, a Megatron .bin/.idx pair, or a saved `datasets` folder"
    if (partial := partial_folder(path)).is_dir():
        return f"{path} is not finished; run the same `armillary-data prepare` again, it goes on from {partial}"
    return f"{path} {'holds no tokens' if path.exists() else 'does not exist'}; {accepted}"
