"""Packages that only some uses take: imported when they are first needed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def optional(module: str, extra: str, package: str) -> ModuleType:
    """The package `module`, which the extra `extra` of one of our packages installs.

    Raises:
        ImportError: it is not installed; says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install '{package}[{extra}]'") from error
