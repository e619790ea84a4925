"""The files of a Hugging Face folder: their names, reading JSON and the index of weights, atomic replacement."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from armillary.core.parts import integer, is_file_name, read_json, writing

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"

WEIGHT_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""The names that `save_pretrained` gives to files of weights."""

PARTIAL = ".partial"
"""Suffix of a file that is being written. The complete file is renamed to the name without it."""

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
)
"""Files that `save_pretrained` copies from the folder of the model's original weights."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of weights that are pickles, which are never read."""


def ends_of_text(folder: Path) -> list[int] | None:
    """Returns the ids of the tokens that end a text: `eos_token_id` of `generation_config.json`, else of `config.json`.

    None if neither file has it.

    Raises:
        ValueError: as `read_json`, or eos_token_id is not an integer or a list of integers.
    """
    for name in (GENERATION, CONFIG):
        path = folder / name
        tokens = read_json(path).get("eos_token_id") if path.is_file() else None
        if tokens is not None:
            values = cast("list[object]", tokens) if isinstance(tokens, list) else [tokens]
            try:
                return [integer("eos_token_id", value) for value in values]
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    return None


def as_json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"


def has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor, as the index lists it. None if there is one file with all weights.

    With both, the index is ignored, as by `transformers`.

    Raises:
        ValueError: file and index are missing, or the index does not map names to files of this folder.
    """
    if not has_weights(folder):
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES) if folder.is_dir() else []
        hint = f"; {pickles[0]} is a pickle, and only safetensors are read" if pickles else ""
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
    if (folder / WEIGHTS).is_file():
        return None
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{folder / INDEX} lacks weight_map")
    for name, file in cast("dict[str, object]", files).items():
        if not is_file_name(file):
            raise ValueError(f"{folder / INDEX} has {name} in {file!r}, which is no file's name")
        if not os.path.isfile(folder / file):
            raise ValueError(f"{folder / INDEX} has {name} in {file}, and there is no such file")
    return cast("dict[str, str]", files)


def write_partial(path: Path, save: Callable[[Path], object]) -> None:
    """Calls `save` with the path of the partial file of `path`, and syncs that file to disk.

    `replace_by_partial` then renames it to `path`.
    """
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        save(partial)
        # Without the sync, `path` could have the content of neither the old nor the new file after a crash.
        with partial.open("rb+") as file:
            os.fsync(file.fileno())


def replace_by_partial(path: Path) -> None:
    """Replaces the file at `path` by its partial file."""
    os.replace(path.with_name(path.name + PARTIAL), path)


def discard(path: Path) -> None:
    """Removes the partial file of `path`, if there is one."""
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)


def earlier_weights(folder: Path) -> set[str]:
    """Returns the existing weight files of an earlier save: `model.safetensors`, and the files that its index lists.

    Other files may not be from a save of ours, and must not be removed.
    """
    files_by_tensor: object = None
    if (folder / INDEX).is_file():
        with suppress(ValueError):  # a broken index names no files
            files_by_tensor = read_json(folder / INDEX).get("weight_map")
    candidates = {
        WEIGHTS,
        *map(str, cast(dict[str, Any], files_by_tensor).values() if isinstance(files_by_tensor, dict) else ()),
    }
    return {file for file in candidates if WEIGHT_NAME.fullmatch(file) and (folder / file).exists()}
