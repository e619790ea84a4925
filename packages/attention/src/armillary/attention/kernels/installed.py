"""Packages that may be installed, and what their functions take: asked once, and without importing them."""

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
def installed(module: str) -> bool:
    """Whether a module, of a package or by itself, can be imported; imports neither."""
    return found(module)


@cache
def found(module: str) -> bool:
    """`installed`, asked once: looking takes longer than launching a kernel.

    A package alone says little: of flash-attn 4 there is `flash_attn` too, a namespace with nothing of version 2.
    `find_spec` would import the packages that a module is in, so they are looked through here.
    """
    package = module.rpartition(".")[0]
    if module in sys.modules or not package:
        return find_spec(module) is not None
    return found(package) and PathFinder.find_spec(module, _places(package)) is not None


def _places(package: str) -> list[str]:
    """The folders of a package that can be found."""
    outer = package.rpartition(".")[0]
    spec = PathFinder.find_spec(package, _places(outer)) if outer else find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())


@cache
def parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """What a function of an installed release takes; also of one that `torch.library.custom_op` has made."""
    return tuple(signature(getattr(function, "_init_fn", function)).parameters.values())
