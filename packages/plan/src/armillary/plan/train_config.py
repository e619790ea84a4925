"""What was chosen, as a file for `armillary-train --config` or as its flags: a recipe, and what differs from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from armillary.core.files import parse_toml
from armillary.train.config import Config
from armillary.train.config.command import find_recipe
from armillary.train.config.overlay import flag, flat, overlaid


def write(path: Path, recipe: str, config: Config, about: str) -> None:
    """Writes the file.

    Args:
        recipe: that the file begins with.
        about: a line for people.

    Raises:
        ValueError: it cannot be written, or a value has no form in a file.
    """
    text = as_toml(recipe, config, about)
    settings = parse_toml(text)
    if overlaid(recipe_of(settings.pop("recipe")), settings, path) != config:
        raise ValueError(f"--out {path}: the recipe {recipe} has a value that no file takes back; name another recipe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error


def as_toml(recipe: str, config: Config, about: str) -> str:
    """The recipe's name, and sections with what differs from it."""
    sections = dict[str, list[str]]()
    for name, value in changes(recipe, config):
        section, _, key = flag(name).rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {literal(value)}")
    tables = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n".join([f"# {about}", f"recipe = {literal(recipe)}", *tables, ""])


def flags(recipe: str, config: Config) -> list[str]:
    """Arguments for `armillary-train`."""
    return ["--recipe", recipe, *(word for name, value in changes(recipe, config) for word in words(name, value))]


def changes(recipe: str, config: Config) -> Iterator[tuple[str, Any]]:
    """("section.key", value) of all that differs from the recipe."""
    before = dict(flat(recipe_of(recipe)))
    return ((name, value) for name, value in flat(config) if value != before[name])


def recipe_of(name: str) -> Config:
    found = find_recipe(name)()
    assert isinstance(found, Config)
    return found


def words(name: str, value: Any) -> list[str]:
    """A field as command-line arguments."""
    if isinstance(value, bool):
        section, _, key = flag(name).rpartition(".")
        return [f"--{section}.{'' if value else 'no-'}{key}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag(name)}", *(str(item) for item in values)]


def literal(value: Any) -> str:
    """A value in TOML; None as `overlaid` takes it."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(literal, value))}]"
    return json.dumps("none" if value is None else str(value), ensure_ascii=False)
