"""KV caches of models on shards: a model makes none by default, because a shard has no keys of other ranks to cache."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

from torch import nn

from armillary.integrations.transformers.models import methods_of


def disable_caches(model: nn.Module) -> None:
    """Makes the parts of a model that attend over shards use no KV cache by default.

    A call may still ask for one with `use_cache=True`. The config, which is saved with the model, is not changed.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        # Only models have this method, and not their layers.
        if not hasattr(type(module), "get_correct_attn_implementation"):
            continue
        parameters = list(signature(type(module).forward).parameters)
        hooked = any(isinstance(hook, UncachedCall) for hook in module._forward_pre_hooks.values())
        if "use_cache" in parameters and not hooked:
            position = parameters.index("use_cache") - 1  # without self
            module.register_forward_pre_hook(UncachedCall(position), with_kwargs=True)


class UncachedCall:
    """Pre-forward hook that sets `use_cache` to False in calls that leave it to the config.

    Args:
        position: index of `use_cache` among positional arguments.
    """

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_default = len(args) <= self.position and kwargs.get("use_cache") is None
        # The model may have another implementation by now, for example to generate.
        if is_default and methods_of(model.config):
            return args, {**kwargs, "use_cache": False}
        return None
