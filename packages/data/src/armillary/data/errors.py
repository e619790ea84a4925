"""Errors that say what to do about a missing package, an unreadable file or a damaged one."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


class DamagedInput(ValueError):
    """A file is damaged. If the work has begun, `armillary-train` exits with `FAILED` for it, not with `REFUSED`."""


def optional(module: str, extra: str, package: str = "armillary-data") -> ModuleType:
    """Imports `module`, which the extra `extra` of `package` installs.

    Raises:
        ImportError: the module cannot be imported; the message has the reason, and the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install '{package}[{extra}]'") from error


@contextmanager
def readable(
    path: str | os.PathLike[str], advice: str, errors: tuple[type[Exception], ...] = (OSError,)
) -> Generator[None]:
    """Context manager that raises errors of reading a file as a ValueError, which names the file and gives advice.

    Args:
        path: the file, if the error does not name another one.
    """
    try:
        yield
    except errors as error:
        file, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
        raise ValueError(f"{file} cannot be read ({reason}); {advice}") from error
