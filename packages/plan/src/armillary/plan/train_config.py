"""Writes a trainer configuration as TOML for `armillary-train --config`, or as flags: a recipe and its changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from armillary.core.parts import parse_toml
from armillary.train import Config
from armillary.train.config import flag, flat, overlay_settings, recipe_config


def write_toml(path: Path, recipe: str, config: Config, comment: str) -> None:
    """Writes a configuration to a TOML file, with `comment` as its first line.

    Raises:
        ValueError: the file cannot be written, or a value has no representation in TOML.
    """
    text = toml_text(recipe, config, comment)
    settings = parse_toml(text)
    # Read the text back: a user's recipe may have values, such as objects, that TOML cannot express.
    if overlay_settings(recipe_config(settings.pop("recipe")), settings, path) != config:
        raise ValueError(f"--out {path}: the recipe {recipe} has a value that TOML cannot express; name another recipe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error


def toml_text(recipe: str, config: Config, comment: str) -> str:
    """Returns TOML with the recipe's name, and a table for each section whose settings differ from the recipe's."""
    sections = dict[str, list[str]]()
    for name, value in changes(recipe, config):
        section, _, key = flag(name).rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {literal(value)}")
    tables = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n".join([f"# {comment}", f"recipe = {literal(recipe)}", *tables, ""])


def flags(recipe: str, config: Config) -> list[str]:
    """Returns the arguments of `armillary-train` that give this configuration."""
    words = ["--recipe", recipe]
    for name, value in changes(recipe, config):
        if isinstance(value, bool):  # --section.no-key
            section, _, key = flag(name).rpartition(".")
            words.append(f"--{section}.{'' if value else 'no-'}{key}")
        else:
            words += [f"--{flag(name)}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def changes(recipe: str, config: Config) -> Iterator[tuple[str, Any]]:
    """Returns ("section.key", value) of each setting that differs from the recipe's."""
    defaults = dict(flat(recipe_config(recipe)))
    return ((name, value) for name, value in flat(config) if value != defaults[name])


def literal(value: Any) -> str:
    """Formats a value as TOML. None becomes "none", which `overlay_settings` reads as None."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(literal, value))}]"
    return json.dumps("none" if value is None else str(value), ensure_ascii=False)
