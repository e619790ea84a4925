"""Imports at first use, for faces of packages with slow modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def imported_at_first_use(face: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """Returns a module's `__getattr__`, which imports a slow name when it is first asked for.

    Args:
        face: name of the module that has the names.
        modules: the names of each slow module.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def getattr_(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[face], name, value)  # the next use does not come here
        return value

    return getattr_
