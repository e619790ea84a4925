"""Installed modules, found without importing them, and the parameters of functions. Each is looked up once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Any

from armillary.core.parts import compat


@compat.constant_when_traced
def is_installed(module: str) -> bool:
    """Returns True if a module can be imported. Imports neither the module nor its parent packages."""
    return module_exists(module)


@cache
def module_exists(module: str) -> bool:
    """Cached `is_installed`: the search takes longer than a kernel launch.

    It is not enough to find the parent package: flash-attn 4 also installs a `flash_attn`, but without the modules of
    version 2. `find_spec` would import the parents of a submodule, so `PathFinder` searches their folders instead.
    """
    package = module.rpartition(".")[0]
    if module in sys.modules or not package:
        return find_spec(module) is not None
    return module_exists(package) and PathFinder.find_spec(module, _folders(package)) is not None


def _folders(package: str) -> list[str]:
    """Returns the folders of an installed package, without importing it."""
    outer = package.rpartition(".")[0]
    spec = PathFinder.find_spec(package, _folders(outer)) if outer else find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())


@cache
def parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Returns the parameters of a function. `torch.library.custom_op` keeps the function it wraps as `_init_fn`."""
    return tuple(signature(getattr(function, "_init_fn", function)).parameters.values())
