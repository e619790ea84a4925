"""What people's files say, with one kind of error for all that may be wrong with them, and files that appear whole."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard


def parse_json(text: str | bytes) -> Any:
    """What JSON says; whatever is wrong with it is a ValueError."""
    return _parsed(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """What TOML says; whatever is wrong with it is a ValueError."""
    return _parsed(tomllib.loads, text)


def _parsed(parser: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parser(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def is_file_name(name: object) -> TypeGuard[str]:
    """Tells names of files in a folder from text that leads elsewhere, such as "..", "a/b" or nothing at all."""
    return isinstance(name, str) and name not in ("", "..") and "\0" not in name and Path(name).name == name


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Adds the path to an OSError that lacks it: a write to a full disk fails without a file name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Replaces the file at `path`, once `write` has written a complete one beside it; returns `path`."""
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        write(partial)
        return partial.replace(path)
