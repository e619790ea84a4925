"""Mechanisms that a tiny copy may not exercise: selections of keys, and layers with a state.

A selection that keeps all keys of a short sequence, or that no layer of the copy has, is not checked by its results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from armillary.integrations.check.step import Architecture, new_model
from armillary.integrations.check.tiny import VOCABULARY
from armillary.integrations.transformers.states import shards_states

SELECTION = re.compile("Indexer|Compressor|Sparse[A-Za-z]*Attention|LSH")
"""Matches class names of modules that select the keys of a query (DeepSeek, MiniMax), or compress them."""


class NotJudged(ValueError):
    """The result of a copy is right, but a mechanism of the architecture was not exercised."""


class SelectionMode(TorchFunctionMode):
    """Mode that notes the classes of modules that keep fewer entries than there are, by topk."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[type] = []
        self.selecting: set[type] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.running and func in (torch.topk, torch.Tensor.topk):
            count = args[1] if len(args) > 1 else kwargs["k"]
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            if count < args[0].shape[dim]:
                self.selecting.update(self.running)
        return func(*args, **kwargs)


def check_mechanisms(config: Any, tokens: int, *, every_mechanism: bool) -> None:
    """Checks that the copy of an architecture exercises its selections of keys and its layers with a state.

    Args:
        tokens: length of the sequence.
        every_mechanism: True requires each such class of the model's file, as for a model type, whose other configs may
            have it; False those that the config builds.

    Raises:
        NotJudged: a class is not built, or its selection keeps all keys of the sequence.
    """
    model = new_model(Architecture(config))
    built = {type(module) for module in model.modules()}
    required = set(_mechanisms(type(model))) if every_mechanism else set(filter(_is_mechanism, built))
    if missing := required - built:
        raise NotJudged(
            f"no layer of the default {config.model_type} has {_names(missing)}, so this part of the architecture was "
            "not checked: give a config.json whose layers have it"
        )
    selections = {layer for layer in required if _selects(layer)}
    if not selections:
        return
    if idle := selections - _selecting_classes(model, selections, tokens):
        raise NotJudged(
            f"{_names(idle)} keeps all keys of a sequence of {tokens} tokens, so its selection was not checked: give "
            "more --tokens, or a config.json in which it keeps fewer"
        )


def _names(classes: set[type]) -> str:
    return ", ".join(sorted(x.__name__ for x in classes))


def _mechanisms(model: type) -> Iterator[type]:
    """Yields the classes of a model's file that `_is_mechanism`."""
    for value in vars(sys.modules[model.__module__]).values():
        if isinstance(value, type) and issubclass(value, nn.Module) and _is_mechanism(value):
            yield value


def _is_mechanism(layer: type) -> bool:
    if hasattr(layer, "get_correct_attn_implementation"):  # a model, such as MiniMaxM3SparseForConditionalGeneration
        return False
    selects_itself = "Attention" in layer.__name__ and _selects(layer)  # routers of experts call topk too
    return SELECTION.search(layer.__name__) is not None or selects_itself or shards_states(layer)


def _selects(layer: type) -> bool:
    """Returns True if a method of a class calls topk."""
    methods = [unwrap(x) for x in vars(layer).values() if isinstance(x, FunctionType)]  # without torch.no_grad
    return any("topk" in method.__code__.co_names for method in methods)


def _selecting_classes(model: nn.Module, classes: set[type], tokens: int) -> set[type]:
    """Runs a model on a sequence and returns the classes whose modules keep fewer entries than there are."""
    mode = SelectionMode()

    def start(layer: type, *_: Any) -> None:
        mode.running.append(layer)

    def stop(*_: Any) -> None:
        mode.running.pop()

    for module in model.modules():
        if type(module) in classes:
            module.register_forward_pre_hook(partial(start, type(module)))
            module.register_forward_hook(stop)
    with torch.no_grad(), mode:
        model.eval()(torch.randint(3, VOCABULARY, (1, tokens)), use_cache=False)
    return mode.selecting
