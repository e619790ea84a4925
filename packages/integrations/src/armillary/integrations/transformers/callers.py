"""Arguments of the functions that call a mask function of transformers, read from their stack frames.

transformers does not pass a mask function the model, position ids and token types, which a sharded mask needs.
"""

from __future__ import annotations

from inspect import currentframe
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

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


def position_ids_of(callers: list[Caller], shards: int) -> tuple[Tensor | None, bool]:
    """Returns (position ids in the callers' frames or None, True if the model would count positions itself).

    Some models pass position ids to the function that makes masks but not to their layers, and some to neither. A model
    without input_ids and inputs_embeds, such as an image tower, adds positions before its tokens are sharded.

    Raises:
        ValueError: the model takes tokens but no position ids (BART): it counts from the first token of each shard,
            whatever position ids its layers get.
    """
    module_methods = [caller for caller in callers if isinstance(caller.locals.get("self"), nn.Module)]
    takes_position_ids = any("position_ids" in method.parameters for method in module_methods)
    tokens = [method.locals.get(name) for method in module_methods for name in ("input_ids", "inputs_embeds")]
    has_tokens = any(isinstance(x, Tensor) for x in tokens)
    if shards > 1 and has_tokens and not takes_position_ids:
        raise ValueError(
            f"{type(calling_module(callers)).__name__}.forward takes no position_ids: it counts positions from the "
            "first token of each shard; models whose forward takes position_ids can be sharded"
        )
    candidates = [ids for caller in callers if isinstance(ids := caller.locals.get("position_ids"), Tensor)]
    if candidates:
        return candidates[0] if candidates[0].ndim > 1 else candidates[0][None], False
    return None, takes_position_ids or has_tokens


def boundaries_of(callers: list[Caller]) -> tuple[Tensor | None, Tensor | None]:
    """Returns cu_seq_lens_q and cu_seq_lens_k of the callers, which models pass on to their layers; None without."""
    for caller in callers:
        arguments = {**caller.locals, **caller.locals.get("kwargs", {})}
        if isinstance(arguments.get("cu_seq_lens_q"), Tensor):
            return arguments["cu_seq_lens_q"], arguments.get("cu_seq_lens_k")
    return None, None
