"""Packages of this package's extras, imported when they are first needed."""

from __future__ import annotations

from types import ModuleType

from armillary.core import optional as core


def optional(module: str, extra: str, package: str = "armillary-data") -> ModuleType:
    """Imports a package of an extra, by default one of armillary-data's; errors as in `armillary.core.optional`."""
    return core.optional(module, extra, package)
