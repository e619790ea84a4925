"""Settings in nested dataclasses: updates from TOML or JSON files, comparison, and the flags of fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from armillary.core.parts import parse_object, parse_toml, read_file
from armillary.data.console import SUCH_AS, one_line, whole_number

Settings = TypeVar("Settings")

# -- files ------------------------------------------------------------------------------------------------------------


def read_settings(path: Path) -> dict[str, Any]:
    """Reads a TOML or JSON file: sections with their keys, and keys before the first section.

    Raises:
        ValueError: the file cannot be read, or is not TOML or JSON.
    """
    readers = {".toml": parse_toml, ".json": parse_object}
    if path.suffix not in readers:
        raise ValueError(f"--config {path}: give a file that ends in .toml or .json")
    try:
        return readers[path.suffix](read_file(path))
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: {one_line(str(error))}") from error


def overlay_settings(
    config: Settings, settings: Mapping[str, Any], source: Path, removed: Mapping[str, str] | None = None
) -> Settings:
    """Returns the configuration, updated with the settings of the file `source`. Keys may have dashes or underscores.

    Args:
        removed: keys of earlier versions, with what to write instead. A file with such a key is refused.

    Raises:
        ValueError: an unknown key, with the nearest valid one, or a value of the wrong kind; names the file.
    """
    hints = {name: "" for name, _ in flat(config)} | dict(removed or {})
    return overlay_section(config, settings, f"--config {source}", hints, "")


def overlay_section(
    config: Settings, settings: Mapping[str, Any], source: str, hints: Mapping[str, str], prefix: str
) -> Settings:
    """Returns a section updated with `settings`. `prefix` is the section's prefix of keys, such as "model."."""
    annotations, changes = get_type_hints(type(config), include_extras=True), dict[str, Any]()
    for key, value in settings.items():
        name = key.replace("-", "_")  # a file may spell keys as flags do
        if name not in annotations:
            raise ValueError(f"{source}: {prefix}{key} is no key; {hint_for(prefix + name, hints)}")
        if name in changes:
            raise ValueError(f"{source}: {prefix}{key} is set twice")
        old = getattr(config, name)
        if not is_dataclass(old):
            changes[name] = convert(value, annotations[name], f"{source}: {prefix}{name}")
        elif isinstance(value, dict):
            changes[name] = overlay_section(old, value, source, hints, f"{prefix}{name}.")
        else:
            raise ValueError(f"{source}: {prefix}{name} is a section, not {value!r}")
    try:
        return replace(config, **changes)  # pyright: ignore[reportCallIssue, reportArgumentType, reportUnknownVariableType]
    except ValueError as error:  # from a section's own `__post_init__`, such as `Checkpointing`'s
        raise ValueError(f"{source}: {prefix.rstrip('.')}: {error}") from error


def hint_for(key: str, hints: Mapping[str, str]) -> str:
    """Returns the hint for a key of an earlier version, else one with the most similar key.

    Args:
        hints: all keys; those of earlier versions with a hint, current ones with "".
    """
    if hint := hints.get(key):
        return hint
    # A key in the wrong section is a likelier mistake than a misspelt one, so equal last parts come first.
    leaf, names = key.rpartition(".")[2], [name for name, hint in hints.items() if not hint]
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    return f"the nearest is {(same_leaf or get_close_matches(key, names, n=1, cutoff=0.0))[0]}"


def convert(value: object, annotation: Any, key: str) -> Any:
    """Converts a file's value to a field's type. As on the command line, "none" is None and "64k" a whole number.

    Raises:
        ValueError: a value of another type; names the key.
    """
    adapter = TypeAdapter[Any](annotation)
    if value in ("none", "None") and accepts(adapter, None) and not accepts(adapter, "none"):
        return None
    try:
        # Through JSON: strict validation of JSON accepts a list for a tuple and a text for a path; that of Python
        # values refuses both.
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        # A text such as "64k" is a number only where the field's type refuses texts, so it is tried second.
        if isinstance(value, str | list) and (number := as_numbers(value)) != value:
            return convert(number, annotation, key)
        example = f", such as {SUCH_AS}" if any(detail["type"] == "int_type" for detail in error.errors()) else ""
        requirements = "; or: ".join(dict.fromkeys(detail["msg"] for detail in error.errors())) + example
        raise ValueError(f"{key} = {value!r}: {requirements}") from error


def accepts(adapter: TypeAdapter[Any], value: object) -> bool:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def as_numbers(value: object) -> object:
    """Replaces texts such as "64k" and "1Mi", in lists too, by their numbers."""
    if isinstance(value, list):
        return [as_numbers(item) for item in value]
    with suppress(ValueError):
        return whole_number(value) if isinstance(value, str) else value
    return value


# -- flags and differences --------------------------------------------------------------------------------------------


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("section.key", value) for every field that is not a section."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def by_flag(config: object) -> dict[str, Any]:
    """Returns the values of all fields by flag, to compare the configurations of ranks.

    A path counts as equal to any other, because hosts may mount the same folder in different places.
    """

    def has_path(value: Any) -> bool:
        return any(isinstance(item, Path) for item in (value if isinstance(value, tuple) else (value,)))  # pyright: ignore[reportUnknownVariableType]

    return {f"--{flag(name)}": "a path" if has_path(value) else value for name, value in flat(config)}


def differences(before: object, after: object) -> list[str]:
    """Returns aligned lines for the fields that differ, such as "model.dim  128 -> 256"."""
    old = dict(flat(before))
    return align_columns(
        [(flag(name), flag_text(old[name]), flag_text(new)) for name, new in flat(after) if new != old[name]]
    )


def align_columns(changes: Sequence[tuple[str, str, str]]) -> list[str]:
    """Returns a line for each (name, old, new)."""
    width = max((len(name) for name, *_ in changes), default=0)
    return [f"{name:{width}}  {old} -> {new}" for name, old, new in changes]


def flag(name: str) -> str:
    """Returns a field's name as on the command line, without the leading dashes."""
    return name.replace("_", "-")


def flag_text(value: object) -> str:
    """Returns a value as it is written on the command line."""
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    return "none" if value is None else str(value)
