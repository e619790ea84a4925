"""Packages of extras, imported at their first use."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def optional(module: str, extra: str, package: str = "armillary-data") -> ModuleType:
    """Imports `module`, which the extra `extra` of `package` installs.

    Raises:
        ImportError: the module cannot be imported; the message has the reason, and the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install '{package}[{extra}]'") from error
