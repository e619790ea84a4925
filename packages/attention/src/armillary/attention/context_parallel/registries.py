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
    def loaded() -> Registries | None:
        """Those of the transformers that this process has imported, None if it has not."""
        models, masks = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "masking_utils"))
        found = getattr(models, "ALL_ATTENTION_FUNCTIONS", None), getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", None)
        return None if found[0] is None or found[1] is None else Registries(*found)


class Refusal:
    """Stands in a registry for the function of one name, and refuses calls, until `end`."""

    def __init__(self, registry: Any, name: str, why: str) -> None:
        self.registry, self.name, self.why, self.live = registry, name, why, True
        self.function = registry[name]
        registry.register(name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.live:
            return self.function(*args, **kwargs)
        who = type(kwargs["config"] if "config" in kwargs else args[0]).__name__
        raise ValueError(f"{who}: {self.why}")

    def end(self) -> None:
        """Puts the function back; where another thread has put something in front meanwhile, lets calls through."""
        self.live = False
        if self.registry[self.name] is self:
            self.registry.register(self.name, self.function)


def refuse_models(why: str) -> list[Refusal]:
    """Refuses, until each is ended, what models of transformers call in order to attend, but for our own functions.

    A model makes its masks first, so that this is where most are refused; layers without a mask at their attention.
    """
    found = Registries.loaded()
    if found is None:
        return []
    own = {name for name in found.attention if method_of_implementation(found.attention[name])}
    return [Refusal(registry, name, why) for registry in found for name in registry.valid_keys() if name not in own]


class ShardedImplementation:
    """Base class of the implementations whose methods `register_transformers` puts into the registries."""

    def __init__(self, attend: Method) -> None:
        self.attend = attend


def method_of_implementation(function: Any) -> Method | None:
    """Returns the method behind a registered function of ours; None for other functions."""
    implementation = getattr(function, "__self__", None)
    return implementation.attend if isinstance(implementation, ShardedImplementation) else None
