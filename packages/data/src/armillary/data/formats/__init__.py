"""Formats of token files, opened as `TokenStore`."""

from __future__ import annotations

import os
from pathlib import Path

from armillary.data.formats.arrow import is_arrow, open_arrow
from armillary.data.formats.folder import is_folder, open_folder, partial_folder, readable, verify_folder
from armillary.data.formats.megatron import megatron_prefix, open_megatron
from armillary.data.store import TokenStore, check_tokenizer
from armillary.data.text.byte_tokenizer import Tokenizer

__all__ = ["is_store", "open_store", "verify_folder"]


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
    with readable(path):
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
    if tokenizer is not None:
        check_tokenizer(store, tokenizer)
    return store


def is_store(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path looks like a store for `open_store`, or an unfinished one of `armillary-data prepare`.

    Raises:
        ValueError: the path cannot be read.
    """
    path = Path(path)
    with readable(path):
        return is_folder(path) or megatron_prefix(path) is not None or is_arrow(path) or partial_folder(path).is_dir()
