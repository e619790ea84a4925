"""The two registries in which Hugging Face transformers looks up attention, if it has been imported."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from armillary.attention.methods.base import Method


class Registries(NamedTuple):
    """Attention functions by name, and the functions that make their masks."""

    attention: Any
    masks: Any

    @staticmethod
    def find() -> Registries | None:
        """Returns the registries of transformers if this process has imported it, else None."""
        # Looked up, not imported: users of plain torch must not wait for the import of transformers.
        models, masks = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "masking_utils"))
        attention_functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", None)
        mask_functions = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", None)
        if attention_functions is None or mask_functions is None:
            return None
        return Registries(attention_functions, mask_functions)


class Refusal:
    """Replaces the function of one name in a registry and raises ValueError when called, until `end`."""

    def __init__(self, registry: Any, name: str, reason: str) -> None:
        self.registry, self.name, self.reason, self.active = registry, name, reason, True
        self.function = registry[name]
        registry.register(name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.function(*args, **kwargs)
        caller = type(kwargs["config"] if "config" in kwargs else args[0]).__name__
        raise ValueError(f"{caller}: {self.reason}")

    def end(self) -> None:
        """Restores the function, or passes calls to it if another thread has replaced this object."""
        self.active = False
        if self.registry[self.name] is self:
            self.registry.register(self.name, self.function)


def refuse_models(reason: str) -> list[Refusal]:
    """Makes models of transformers raise when they attend, unless by our functions, until each refusal is ended.

    A model makes its masks first, so most are refused there; layers without a mask at their attention.
    """
    registries = Registries.find()
    if registries is None:
        return []
    functions = registries.attention
    # Models with our implementations see masks and windows, so they may be called inside sdpa_parallel.
    own_names = {name for name in functions if method_of_implementation(functions[name])}
    return [
        Refusal(registry, name, reason)
        for registry in registries
        for name in registry.valid_keys()
        if name not in own_names
    ]


class ShardedImplementation:
    """Base class of the implementations whose methods `register_transformers` puts into the registries."""

    def __init__(self, method: Method) -> None:
        self.method = method


def method_of_implementation(function: Any) -> Method | None:
    """Returns the method behind a registered function of ours; None for other functions."""
    implementation = getattr(function, "__self__", None)
    return implementation.method if isinstance(implementation, ShardedImplementation) else None
