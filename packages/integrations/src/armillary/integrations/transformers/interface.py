"""The attention interface of transformers: the method that a config selects by it, and the modules that attend by it.

Modules are recognized by the code of their forwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import signature, unwrap
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from armillary.attention import Method
from armillary.attention.parts import Registries, method_of_implementation

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The registry in which an attention module of transformers looks up the selected implementation."""

OWN_ATTENTION = frozenset({"softmax", "scaled_dot_product_attention"})
"""Functions by which a module computes attention weights itself."""

ATTENTION = re.compile("Attention|Attn")
"""Matches class names of modules that attend. Routers of experts call softmax too."""


def calls_interface(module: nn.Module) -> bool:
    """Returns True if the forward of a module, or a function that it calls, uses transformers' attention interface."""
    return INTERFACE in _names_in_forward(module)


def computes_attention(module: nn.Module) -> bool:
    """Returns True if a module computes attention without transformers' attention interface."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if ATTENTION.search(type(module).__name__) is None:
        return False
    names = _names_in_forward(module)
    return INTERFACE not in names and not OWN_ATTENTION.isdisjoint(names)


def check_own_attention(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for a layer of tokens, among the named modules of a model, that computes attention itself."""
    for name, module in modules:
        if computes_attention(module) and _is_token_layer(model, name):
            raise ValueError(
                f"{type(model).__name__}.{name} ({type(module).__name__}) computes attention itself, without "
                "transformers' attention interface, so its tokens would see those of their shard only; such a model "
                "cannot be sharded"
            )


def innermost_model(model: nn.Module, name: str) -> tuple[nn.Module, list[str]]:
    """Returns the innermost model of transformers that has the named module, or is it, and the path below that model.

    The outermost model if none is one of transformers.
    """
    path = name.split(".") if name else []
    for depth in range(len(path), 0, -1):
        part = model.get_submodule(".".join(path[:depth]))
        if hasattr(type(part), "get_correct_attn_implementation"):
            return part, path[depth:]
    return model, path


def _is_token_layer(model: nn.Module, name: str) -> bool:
    """Returns True for a module in a list of layers of a model that takes token ids, not in its image or audio parts.

    Other modules, such as the projector of images, do not see the tokens of a shard.
    """
    part, path = innermost_model(model, name)
    return "input_ids" in signature(part.forward).parameters and any(map(str.isdigit, path))


def _names_in_forward(module: nn.Module) -> set[str]:
    """Returns the names in a module's forward and in the functions of its file, or of a user's, that it calls.

    A wrapper of forward, set on a class or on one module, is followed to the function that it wraps, and super() to the
    forwards of all bases.
    """
    forwards = [vars(base).get("forward") for base in type(module).__mro__ if base is not nn.Module]
    return set(_names([vars(module).get("forward"), *forwards], type(module), set()))


def _names(functions: Iterable[Any], owner: type, visited: set[CodeType]) -> Iterator[str]:
    """Yields the names in functions and in those that they call, by global name or as methods of `owner`."""
    for function in functions:
        function = unwrap(function) if callable(function) else function
        function = getattr(function, "__func__", function)  # of a bound method
        if not isinstance(function, FunctionType) or function.__code__ in visited:
            continue
        visited.add(function.__code__)
        names = set(_names_in_code(function.__code__))
        yield from names
        callees = [getattr(owner, name, None) or function.__globals__.get(name) for name in names]
        # Functions of libraries serve many models, so they say nothing about this one.
        yield from _names([x for x in callees if isinstance(x, FunctionType) and _is_own(x, function)], owner, visited)


def _is_own(callee: FunctionType, caller: FunctionType) -> bool:
    library = str(callee.__module__).split(".")[0] in ("torch", "transformers")
    return callee.__module__ == caller.__module__ or not library


def _names_in_code(code: CodeType) -> Iterator[str]:
    """Yields the global and attribute names in a code object and in the functions defined inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the named modules of a model, without parts that select another implementation."""
    unsharded = [name for name, module in model.named_modules() if module is not model and is_unsharded(module)]
    for name, module in model.named_modules():
        if not any(name == part or name.startswith(f"{part}.") for part in unsharded):
            yield name, module


def is_unsharded(module: nn.Module) -> bool:
    """Returns True for a submodel that selects another implementation."""
    registries, config = Registries.find(), getattr(module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if registries is None or name is None or not hasattr(type(module), "get_correct_attn_implementation"):
        return False
    return not method_of_implementation(registries.attention.get(name))


def shards_of(config: Any) -> int:
    """Returns the number of ranks that share a sequence under a config's implementations; 1 without one of ours."""
    return max((method.shards for method in methods_of(config)), default=1)


def methods_of(config: Any) -> list[Method]:
    """Returns the methods of our implementations that a config or its parts select."""
    registries = Registries.find()
    names = dict.fromkeys(getattr(part, "_attn_implementation", None) for part in parts_of(config))
    functions: list[Any] = [registries.attention.get(name) for name in names] if registries else []
    return [method for function in functions if (method := method_of_implementation(function))]


def method_of(config: Any) -> Method | None:
    """Returns the method with the most ranks among `methods_of` a config; None without one."""
    return max(methods_of(config), key=lambda method: method.shards, default=None)


def parts_of(config: Any) -> list[Any]:
    """Returns a config and the configs of its text, vision or audio parts."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    return [config, *(part for part in parts if part is not None)]
