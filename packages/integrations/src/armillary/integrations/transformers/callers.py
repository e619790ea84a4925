"""Arguments of the functions that call a mask function of transformers, read from their stack frames.

transformers does not pass a mask function the model, position ids and token types, which a sharded mask needs.
"""

from __future__ import annotations

from inspect import currentframe
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

MAX_FRAMES = 12
"""More calls than there are between a model's forward and a mask function."""

WRAPPERS = ("torch._dynamo.", "torch._compile")
"""Python modules of the functions through which `compat.never_traced` calls a function."""


class Caller(NamedTuple):
    """A running function: its Python module's name, its local and global variables, its parameters' names."""

    module: str
    locals: dict[str, Any]
    globals: dict[str, Any]
    parameters: tuple[str, ...]


def calling_functions() -> list[Caller]:
    """Returns the callers of the function that calls this one, innermost first, without `WRAPPERS`.

    The list ends after the methods of the innermost `nn.Module`, and has at most MAX_FRAMES functions.
    """
    callers: list[Caller] = []
    frame: FrameType | None = currentframe()
    for _ in range(2):  # skips this function and the one that calls it
        frame = frame and frame.f_back
    while frame is not None and len(callers) < MAX_FRAMES:
        module_name, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        caller = Caller(module_name, frame.f_locals, frame.f_globals, parameters)
        # The innermost module makes the mask. Modules that call it may have other tokens, so the search stops there.
        module = calling_module(callers)
        if module is not None and caller.locals.get("self") is not module:
            break
        if not module_name.startswith(WRAPPERS):
            callers.append(caller)
        frame = frame.f_back
    return callers


def calling_module(callers: list[Caller]) -> nn.Module | None:
    """Returns the innermost module of which one of the callers is a method."""
    owners = (caller.locals.get("self") for caller in callers)
    return next((owner for owner in owners if isinstance(owner, nn.Module)), None)
