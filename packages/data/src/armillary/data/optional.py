"""Packages that only some uses take: imported when they are first needed."""

from __future__ import annotations

from types import ModuleType

from armillary.core import optional as core


def optional(module: str, extra: str, package: str = "armillary-data") -> ModuleType:
    """As `armillary.core.optional`, for the extras of this package unless told otherwise."""
    return core.optional(module, extra, package)
