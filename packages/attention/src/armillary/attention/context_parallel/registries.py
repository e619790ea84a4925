"""The two registries in which Hugging Face transformers looks up attention, if it has been imported."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from armillary.attention.methods.base import Method


class Registries(NamedTuple):
    """The registries of attention functions and of the functions that make masks for them, both by name."""

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
    """Replaces one function in a registry by a call that raises ValueError, until `end` restores the function."""

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
        """Restores the function. If another thread has replaced this object meanwhile, calls pass to the function."""
        self.active = False
        if self.registry[self.name] is self:
            self.registry.register(self.name, self.function)


def refuse_models(reason: str) -> list[Refusal]:
    """Makes models of transformers raise ValueError, except models prepared by our integration. Returns the refusals.

    A model raises when it makes its masks, or, if it makes none, when its first layer attends. The caller must `end`
    each refusal.
    """
    registries = Registries.find()
    if registries is None:
        return []
    functions = registries.attention
    # Our implementations get each layer's mask and window, so their models may be called inside sdpa_parallel.
    own_names = {name for name in functions if method_of_implementation(functions[name])}
    return [
        Refusal(registry, name, reason)
        for registry in registries
        for name in registry.valid_keys()
        if name not in own_names
    ]


class ShardedImplementation:
    """Base class of our implementations. `register_transformers` puts their bound methods into the registries."""

    def __init__(self, method: Method) -> None:
        self.method = method


def method_of_implementation(function: Any) -> Method | None:
    """Returns the attention method of a function that our integration registered; None for other functions."""
    implementation = getattr(function, "__self__", None)
    return implementation.method if isinstance(implementation, ShardedImplementation) else None
