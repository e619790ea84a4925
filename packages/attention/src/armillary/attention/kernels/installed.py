"""Installed modules and the parameters of their functions, looked up once and without importing the modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Any

from armillary.core import compat


@compat.constant_when_traced
def is_installed(module: str) -> bool:
    """True if a module can be imported. Imports neither it nor the packages it is in."""
    return module_exists(module)


@cache
def module_exists(module: str) -> bool:
    """`is_installed`, cached: the search takes longer than a kernel launch.

    The package alone proves nothing: flash-attn 4 also has a `flash_attn`, a namespace without version 2. `find_spec`
    of a submodule imports its packages, so their folders are searched here.
    """
    package = module.rpartition(".")[0]
    if module in sys.modules or not package:
        return find_spec(module) is not None
    return module_exists(package) and PathFinder.find_spec(module, _folders(package)) is not None


def _folders(package: str) -> list[str]:
    """Returns the folders in which an installed package looks for its modules."""
    outer = package.rpartition(".")[0]
    spec = PathFinder.find_spec(package, _folders(outer)) if outer else find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())


@cache
def parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Returns the parameters of a function, or of one that `torch.library.custom_op` has wrapped."""
    return tuple(signature(getattr(function, "_init_fn", function)).parameters.values())
