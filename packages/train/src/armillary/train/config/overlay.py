"""Settings in nested dataclasses: their limits, updates from TOML or JSON files, comparison, and flags of fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import GenericAlias
from typing import Any, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from armillary.core.internal import parse_object, parse_toml, read_file
from armillary.data.console import SUCH_AS, one_line, whole_number
from armillary.train.config.sections import Config

# Words of pydantic's messages, and shorter ones for errors.
PLAIN_WORDS = {
    "Value error, ": "",
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}

# -- limits -----------------------------------------------------------------------------------------------------------


def check_limits(options: Any) -> None:
    """Checks all fields of a dataclass and its sections against their annotations: types, choices and limits.

    Raises ValueError with the flag, the value and the limit.
    """
    try:
        adapter_of(type(options)).validate_python([options])
    except ValidationError as error:
        key, value, requirement = first_fault(error)
        # The flags of a section `run`, the trainer's configuration in options of other commands, have no prefix.
        raise ValueError(f"--{flag(key).removeprefix('run.')} {flag_text(value)}: {requirement}") from error


@lru_cache(maxsize=16)
def adapter_of(kind: type[Any]) -> TypeAdapter[list[Any]]:
    # Strict: it refuses a true for 1 and a text for a number.
    items: Any = GenericAlias(list, (kind,))  # pydantic takes no options for a dataclass itself
    return TypeAdapter(items, config=ConfigDict(strict=True, revalidate_instances="always"))


def first_fault(error: ValidationError) -> tuple[str, Any, str]:
    """Returns ("section.key", value, requirement) of the first refused value."""
    detail = error.errors()[0]
    key = ".".join(word for word in detail["loc"] if isinstance(word, str))  # without indices of lists
    requirement = detail["msg"]
    for words, plain_words in PLAIN_WORDS.items():
        requirement = requirement.replace(words, plain_words)
    return key, detail["input"], requirement + (f", such as {SUCH_AS}" if detail["type"] == "int_type" else "")


# -- files ------------------------------------------------------------------------------------------------------------


def read_settings(path: Path) -> dict[str, Any]:
    """Reads a TOML or JSON file: sections with their keys, and keys before the first section."""
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
    config: Config, settings: Mapping[str, Any], path: Path, removed: Mapping[str, str] | None = None
) -> Config:
    """Returns the configuration, updated with the settings of the file `path`. Keys may have dashes or underscores.

    As on the command line, "none" is None and "64k" a whole number, where a text is not accepted.

    Raises ValueError with the file for a key of an earlier version, with the advice in `removed`; for an unknown key,
    with the nearest valid one; and for a value of the wrong kind.
    """
    # 1. The keys.
    names, changes = [name for name, _ in flat(config)], dict[str, Any]()
    for key, value in flat(settings):
        name = key.replace("-", "_")
        if name not in names:
            raise ValueError(f"--config {path}: {key} is no key; {(removed or {}).get(name) or nearest(name, names)}")
        if name in changes:
            raise ValueError(f"--config {path}: {key} is set twice")
        changes[name] = value
    # 2. The values.
    values = asdict(config)
    for name, value in changes.items():
        section, key = name.split(".")
        values[section][key] = value
    try:
        return config_of(values)
    except ValidationError as error:
        key, _, requirement = first_fault(error)
        shown = f"{key} = {changes[key]!r}" if key in changes else key  # a section that refuses a combination of keys
        raise ValueError(f"--config {path}: {shown}: {requirement}") from error


def config_of(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """Returns the configuration with these values of sections. Raises pydantic's error for those of the wrong kind."""
    # Through JSON: pydantic's strict mode then accepts a list for a tuple and a text for a path.
    tree: Any = json.loads(json.dumps([values], default=str))
    adapter = adapter_of(Config)
    try:
        return adapter.validate_json(json.dumps(tree))[0]
    except ValidationError as error:
        # Texts are tried as numbers only where they are refused as texts.
        for detail in error.errors():
            text, (*places, key) = detail["input"], detail["loc"]
            if isinstance(text, str) and detail["type"] in ("int_type", "float_type"):
                place = tree
                for index in places:
                    place = place[index]
                with suppress(ValueError):
                    place[key] = None if text in ("none", "None") else whole_number(text)
        return adapter.validate_json(json.dumps(tree))[0]


def nearest(key: str, names: Sequence[str]) -> str:
    # A key in the wrong section is a likelier mistake than a misspelt one, so equal last parts come first.
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    return f"the nearest is {(same_leaf or get_close_matches(key, names, n=1, cutoff=0.0))[0]}"


# -- flags and differences --------------------------------------------------------------------------------------------


def flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("section.key", value) for every value of nested dataclasses or dicts that is none of these itself."""
    if isinstance(settings, Mapping):
        items = cast(Mapping[str, Any], settings).items()
    else:
        items = ((field.name, getattr(settings, field.name)) for field in fields(settings))
    for name, value in items:
        if isinstance(value, Mapping) or is_dataclass(value):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def by_flag(config: object) -> dict[str, Any]:
    """Returns the values of all fields by flag, to compare the configurations of ranks."""

    # Paths count as equal, because hosts may mount the same folder in different places.
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
    width = max((len(name) for name, *_ in changes), default=0)
    return [f"{name:{width}}  {old} -> {new}" for name, old, new in changes]


def flag(name: str) -> str:
    return name.replace("_", "-")


def flag_text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    return "none" if value is None else str(value)
