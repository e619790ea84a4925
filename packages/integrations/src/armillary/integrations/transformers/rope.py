"""RoPE of type `dynamic` and `longrope` on shards: its frequencies depend on the last position of the sequence.

transformers derives these frequencies from the largest position id of a call. On a shard that is the shard's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from armillary.attention import Method
from armillary.attention.parts import gather_integers
from armillary.core.parts import compat


def depends_on_last_position(rope: Any) -> bool:
    """Returns True if a config's RoPE parameters, or a module's `rope_type`, name such a type for any layer."""
    return any(name in repr(rope) for name in ("dynamic", "longrope"))  # transformers too looks for "dynamic" in a type


HOOKED = "armillary_last_position"
"""Attribute of modules that have their hooks already."""


class RopeHook:
    """Pre-forward hook of a model: its rotary modules get the largest position id of all ranks of a sequence.

    Around such a module, `append` adds this position to the position ids [..., T], and `remove` drops its cosines and
    sines [..., T + 1, D].

    Bytes sent in each forward of a rotary module: a `gather_integers` of one integer.

    Args:
        method_of: returns the method that a config selects, or None.
        sharded_modules: yields the named modules of a model that run on shards.
    """

    def __init__(
        self,
        method_of: Callable[[Any], Method | None],
        sharded_modules: Callable[[nn.Module], Iterator[tuple[str, nn.Module]]],
    ) -> None:
        self.method_of, self.sharded_modules = method_of, sharded_modules

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if hasattr(model, HOOKED):
            return
        setattr(model, HOOKED, True)
        for _, module in self.sharded_modules(model):
            # The hook of a submodel may have come first.
            if depends_on_last_position(getattr(module, "rope_type", None)) and not hasattr(module, HOOKED):
                setattr(module, HOOKED, True)
                module.register_forward_pre_hook(self.append, with_kwargs=True)
                module.register_forward_hook(self.remove)

    @compat.never_traced  # it communicates
    def append(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = self.method_of(module.config)
        if method is None or method.shards == 1:
            return None
        ids: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = max(row[0] for row in gather_integers([[int(ids.max())]], method))
        ids = torch.cat([ids, ids.new_full((*ids.shape[:-1], 1), last)], -1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": ids}
        return (args[0], ids, *args[2:]), kwargs

    def remove(self, module: Any, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> Any:
        method = self.method_of(module.config)
        if method is None or method.shards == 1:
            return output
        return output[..., :-1, :] if isinstance(output, Tensor) else tuple(x[..., :-1, :] for x in output)
