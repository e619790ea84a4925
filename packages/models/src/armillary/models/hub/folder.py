"""The files of a Hugging Face folder: their names, reading JSON and the index of weights, and atomic writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from armillary.core.files import is_file_name, parse_json, writing
from armillary.core.validation import integer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"

WEIGHT_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names that a save gives to its files of weights."""

PARTIAL = ".partial"

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
"""Files that are copied from the source of a model's weights."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        ValueError: the file is missing, or does not contain an object.
    """
    try:
        fields: object = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path}: {reason}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object")
    return cast(dict[str, Any], fields)


def ends_of_text(folder: Path) -> list[int] | None:
    """Returns the tokens that end a text, by `generation_config.json` or else `config.json`; None if neither has any.

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
    """Returns the file of each tensor by the index; None if all are in one file, which `transformers` prefers too.

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
    """Calls `save` with the path of a partial file, and syncs it to disk. `replace_by_partial` moves it to `path`."""
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        save(partial)
        # Otherwise a crash after the rename could leave the new name with the content of neither file.
        with partial.open("rb+") as file:
            os.fsync(file.fileno())


def replace_by_partial(path: Path) -> None:
    """Replaces the file at `path` by its partial file."""
    os.replace(path.with_name(path.name + PARTIAL), path)


def discard(path: Path) -> None:
    """Removes the partial file of `path`, if there is one."""
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)


def earlier_weights(folder: Path) -> set[str]:
    """Returns the weight files of an earlier save, from its index. Files that it does not name are not ours."""
    files_by_tensor: object = None
    if (folder / INDEX).is_file():
        with suppress(ValueError):  # a broken index names no files
            files_by_tensor = read_json(folder / INDEX).get("weight_map")
    candidates = {
        WEIGHTS,
        *map(str, cast(dict[str, Any], files_by_tensor).values() if isinstance(files_by_tensor, dict) else ()),
    }
    return {file for file in candidates if WEIGHT_NAME.fullmatch(file) and (folder / file).exists()}
