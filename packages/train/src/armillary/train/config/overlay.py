"""Nested dataclasses of settings, by their flags and in files: TOML as people write it, JSON as a program leaves it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from armillary.core.files import parse_json, parse_toml
from armillary.data.console.exit import one_line
from armillary.data.console.quantity import SUCH_AS, whole

Settings = TypeVar("Settings")


def read_settings(path: Path) -> dict[str, Any]:
    """Sections and their keys, and what stands before them.

    Raises:
        ValueError: a file that cannot be read, or is neither TOML nor JSON.
    """
    readers = {".toml": parse_toml, ".json": parse_json}
    if path.suffix not in readers:
        raise ValueError(f"--config {path}: give a file that ends in .toml or .json")
    try:
        found: object = readers[path.suffix](path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: {one_line(str(error))}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path}: holds no sections")
    return dict(found)


def overlaid(
    config: Settings, settings: Mapping[str, Any], source: Path, renamed: Mapping[str, str] | None = None
) -> Settings:
    """The configuration, nested dataclasses, with these settings, read from `source`. Keys may have dashes or
    underscores.

    Args:
        renamed: keys of earlier versions, by which a file is refused with the new name.

    Raises:
        ValueError: an unknown key, with the nearest known one, or a value of the wrong kind; names the file.
    """
    known = {name: name for name, _ in flat(config)} | dict(renamed or {})
    return changed(config, settings, f"--config {source}", known, "")


def changed(
    config: Settings, settings: Mapping[str, Any], source: str, known: Mapping[str, str], prefix: str
) -> Settings:
    """A section, of which the keys have this prefix, with its settings."""
    hints, changes = get_type_hints(type(config), include_extras=True), dict[str, Any]()
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise ValueError(f"{source}: {prefix}{key} is no key; {nearest(prefix + name, known)}")
        if name in changes:
            raise ValueError(f"{source}: {prefix}{key} is there twice")
        old = getattr(config, name)
        if not is_dataclass(old):
            changes[name] = converted(value, hints[name], f"{source}: {prefix}{name}")
        elif isinstance(value, dict):
            changes[name] = changed(old, value, source, known, f"{prefix}{name}.")
        else:
            raise ValueError(f"{source}: {prefix}{name} is a section, not {value!r}")
    try:
        return replace(config, **changes)  # pyright: ignore[reportCallIssue, reportArgumentType, reportUnknownVariableType]
    except ValueError as error:
        raise ValueError(f"{source}: {prefix.rstrip('.')}: {error}") from error


def converted(value: object, kind: Any, what: str) -> Any:
    """The value as one of this kind. As on the command line, "none" is None, and text such as "64k" a whole number."""
    adapter = TypeAdapter[Any](kind)
    try:
        if value in ("none", "None") and accepts_none(adapter):
            return None
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        if isinstance(value, str | list) and (counted := as_numbers(value)) != value:
            return converted(counted, kind, what)
        such = f", such as {SUCH_AS}" if any(detail["type"] == "int_type" for detail in error.errors()) else ""
        wanted = "; or: ".join(dict.fromkeys(detail["msg"] for detail in error.errors())) + such
        raise ValueError(f"{what} = {value!r}: {wanted}") from error


def as_numbers(value: object) -> object:
    """Numbers for texts such as "64k" and "1Mi", in lists too."""
    if isinstance(value, list):
        return [as_numbers(item) for item in value]
    with suppress(ValueError):
        return whole(value) if isinstance(value, str) else value
    return value


def accepts_none(adapter: TypeAdapter[Any]) -> bool:
    try:
        adapter.validate_python("none", strict=True)
    except ValidationError:
        try:
            adapter.validate_python(None)
        except ValidationError:
            return False
        return True
    return False


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that is no section: ("section.key", value)."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def by_flag(config: object) -> dict[str, Any]:
    """All fields by their flags. Of paths only that they are given: on another host the same may lie elsewhere."""
    return {f"--{flag(name)}": "a path" if is_path(value) else value for name, value in flat(config)}


def is_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, tuple) and any(isinstance(part, Path) for part in value))


def nearest(key: str, known: Mapping[str, str]) -> str:
    """The key that was probably meant, of those that each name stands for."""
    if key in known:
        return f"it is {known[key]} now"
    leaf, names = key.rpartition(".")[2], list(dict.fromkeys(known.values()))
    same = [name for name in names if name.rpartition(".")[2] == leaf]
    found = (same or get_close_matches(key, names, n=1, cutoff=0.0))[:1]
    return f"the nearest is {found[0]}"


def differences(before: object, after: object) -> list[str]:
    """The fields that differ, as aligned lines such as "model.dim  128 -> 256"."""
    old = dict(flat(before))
    return aligned([(flag(name), shown(old[name]), shown(new)) for name, new in flat(after) if new != old[name]])


def aligned(changes: Sequence[tuple[str, str, str]]) -> list[str]:
    """Lines of (name, old, new)."""
    width = max((len(name) for name, *_ in changes), default=0)
    return [f"{name:{width}}  {old} -> {new}" for name, old, new in changes]


def flag(name: str) -> str:
    """A field's name as it is typed."""
    return name.replace("_", "-")


def shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    return "none" if value is None else str(value)
