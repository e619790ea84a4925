"""Files: parsers that raise only ValueError, OSErrors with file names, and atomic writes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. All errors are ValueErrors."""
    return _parse_nested(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. All errors are ValueErrors."""
    return _parse_nested(tomllib.loads, text)


def _parse_nested(parser: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parser(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def is_file_name(name: object) -> TypeGuard[str]:
    """Returns True if `name` is the name of a file in a folder; False for "..", "a/b" and values that are not text."""
    return isinstance(name, str) and name not in ("", "..") and "\0" not in name and Path(name).name == name


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Context manager that adds `path` to an OSError that has no file name, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Calls `write` with the path of a temporary file beside `path`, then renames that file to `path`; returns `path`.

    So `path` has the old or the new content, never a part of it.
    """
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        write(partial)
        return partial.replace(path)
