"""The parts of a model that are observed in a run, and what its layers should make of attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import isfunction, unwrap
from typing import Any

from torch import nn

from armillary.attention import AttentionMask, Method
from armillary.attention.internal import Registries, method_of_implementation

POSITION = re.compile("wpe|pos", re.I)
"""Matches names of arguments that are position ids, and of embeddings of positions."""
KNOWN_MASKS = ("full_attention", "sliding_attention", None)
"""Layer types of a configuration whose masks are known."""
FADING = re.compile("SSM|Ssm|(?i:mamba|delta|recurrent|linearattention|kda|state)")
"""Matches class names of layers with a state, in which tokens fade. GptOssMLP has none."""
CHOICE = re.compile("expert|moe|router", re.I)
"""Matches names of modules that choose experts: outputs and loss jump where a choice changes."""


@dataclass(frozen=True)
class ModelParts:
    """The modules of a model that can be observed.

    Args:
        layers: the decoder layers.
        embeddings: embedding tables by name; `embedding` is that of token ids.
        head: the linear module that computes logits; `weight` its weight, `tied` if it is the embedding's too.
    """

    layers: tuple[nn.Module, ...]
    embeddings: dict[str, nn.Embedding]
    embedding: nn.Embedding | None
    head: nn.Module | None
    weight: nn.Parameter | None
    tied: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        visible = dict(_visible_modules(model))
        stacks = [x for x in visible.values() if isinstance(x, (nn.ModuleList, nn.Sequential))]
        stack = max(stacks, key=lambda x: sum(p.numel() for p in x.parameters()), default=())
        layers = tuple(x for x in stack if x in set(visible.values()))
        inside = {id(x) for layer in layers for x in layer.modules()}
        outside = {name: x for name, x in visible.items() if id(x) not in inside}
        embeddings = {name: x for name, x in outside.items() if isinstance(x, nn.Embedding)}
        embedding = next((x for name, x in embeddings.items() if not POSITION.search(name)), None)
        vocabulary = getattr(embedding, "num_embeddings", None)
        linears = [x for x in outside.values() if isinstance(x, nn.Linear)]
        head = next((x for x in reversed(linears) if x.out_features == vocabulary), None)
        # Armillary's models with a tied weight have no module for the head.
        weight: Any = head.weight if head is not None else getattr(model, "head_weight", None)
        tied = weight is not None and weight is getattr(embedding, "weight", None)
        return cls(layers, embeddings, embedding, head, weight, tied)


def _visible_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields modules by name, without compiled ones and those inside, whose hooks a graph may not run."""
    if getattr(module, "_compiled_call_impl", None) is None:
        yield prefix, module
        for name, child in () if hasattr(module, "_orig_mod") else module.named_children():
            yield from _visible_modules(child, f"{prefix}.{name}" if prefix else name)


@dataclass(frozen=True)
class LayerKind:
    """A decoder layer, and the window and softcap that its configuration asks for.

    Args:
        window: the number of tokens that a query sees, its own included; None for all.
        known: False if the configuration names a mask that is not known here, the layer keeps a window that it never
            reads (Moshi), or a state fades: it may reach less far.
        softcap: of its scores; None without.
        configured: False if the model has no configuration, so that calls alone say which window they need.
    """

    layer: nn.Module
    window: int | None
    known: bool
    softcap: float | None
    configured: bool = True

    def differs(self, mask: AttentionMask, softcap: float | None, length: int) -> str | None:
        """Returns the difference of a call of a method, over rows of `length` tokens; None if there is none."""
        row = mask.row(0)
        if self.softcap is not None and softcap != self.softcap:
            return f"softcap {softcap} instead of {self.softcap:g}"
        # Other masks and those of bidirectional models may express a window otherwise.
        if not self.known or not (self.configured or self.window) or not row.causal or row.pattern is not None:
            return None
        expected, actual = self.window or length, length if row.window is None else (row.window[0] or 0) + 1
        same = expected == actual or min(expected, actual) >= length
        return None if same else f"a window of {actual} tokens instead of {expected}"


def kinds_of_layers(model: nn.Module) -> list[LayerKind]:
    """Returns the kind of each decoder layer."""
    config: Any = next((x.config for x in model.modules() if hasattr(x, "config")), None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    types: Any = getattr(config, "layer_types", None) or ()
    kinds = list[LayerKind]()
    for i, layer in enumerate(ModelParts.of(model).layers):
        name = types[i] if i < len(types) else None
        fades = any(FADING.search(type(x).__name__) for x in layer.modules())
        values = [y for x in layer.modules() for key, y in vars(x).items() if "softcap" in key]
        caps = [float(x) for x in values if isinstance(x, (int, float)) and x]
        ignores = _ignores_window(layer)
        known = name in KNOWN_MASKS and not fades and not ignores
        window = None if ignores else _window(layer, name, config)
        kinds.append(LayerKind(layer, window, known, next(iter(caps), None), config is not None))
    return kinds


def layer_kinds(model: nn.Module) -> dict[str, LayerKind]:
    """Returns the first layer of each kind, by its name."""
    first = dict[tuple[object, ...], tuple[str, LayerKind]]()
    for i, kind in enumerate(kinds_of_layers(model)):
        classes = sorted({type(x).__name__ for x in kind.layer.modules()})
        first.setdefault((kind.window, kind.known, kind.softcap, *classes), (f"layer {i}", kind))
    return dict(first.values())


WINDOW_FIELDS = ("sliding_window", "window")


def _ignores_window(layer: nn.Module) -> bool:
    """Returns True for a layer that keeps a window and reads none after its constructor."""
    modules = list(layer.modules())
    classes = {base for module in modules for base in type(module).__mro__ if base is not nn.Module}
    functions = [
        unwrap(x) for base in classes for name, x in vars(base).items() if isfunction(x) and name != "__init__"
    ]
    names = [str(name) for x in functions for name in (*x.__code__.co_names, *x.__code__.co_consts)]
    keeps_one = any(isinstance(vars(module).get(field), int) for module in modules for field in WINDOW_FIELDS)
    return keeps_one and not any("window" in name for name in names)


def _window(layer: nn.Module, kind: str | None, config: Any) -> int | None:
    if kind == "full_attention":
        return None
    values = [vars(x)[key] for x in layer.modules() for key in WINDOW_FIELDS if key in vars(x)]
    if values or kind not in (None, "sliding_attention") or not getattr(config, "use_sliding_window", True):
        return next((value for value in values if isinstance(value, int)), None)
    return getattr(config, "sliding_window", None)


def methods_in(model: nn.Module) -> list[Method]:
    """Returns Armillary's methods by which a model attends: those of its modules, and those that its configs name."""
    registries, methods = Registries.find(), list[Method | None]()
    for module in model.modules():
        methods += [x for x in vars(module).values() if isinstance(x, Method)]
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if registries is not None:
            methods.append(method_of_implementation(registries.attention.get(name)))
    return [x for x in dict.fromkeys(methods) if x is not None]
