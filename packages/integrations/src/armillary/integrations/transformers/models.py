"""Models of Hugging Face transformers: by which method a config attends, and which models cannot run on shards.

Tokens of a model must see each other by transformers' attention interface alone, which calls the registered method, or
by states that `recurrent_layers.py` shards. `check_model` checks the class and the config when the model selects our
implementation, `check_layers_attend` the whole model in `ContextParallel.prepare`, and `check_modules` its modules at
the first call. Modules are recognized by their class and by the code of their forwards.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import getsource, signature, unwrap
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from armillary.attention import Method
from armillary.attention.internal import Registries, method_of_implementation
from armillary.integrations.transformers.own_attention import can_be_routed, is_routed, route_own_attention
from armillary.integrations.transformers.recurrent_layers import (
    STATE_LAYERS,
    has_sharded_states,
    mixes_unknown,
    shards_states,
)

# The methods of a config.


def parts_of(config: Any) -> list[Any]:
    """Returns a config and the configs of its text, vision or audio parts."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    return [config, *(part for part in parts if part is not None)]


def methods_of(config: Any) -> list[Method]:
    """Returns the methods of our implementations that a config or its parts select."""
    registries = Registries.find()
    names = dict.fromkeys(getattr(part, "_attn_implementation", None) for part in parts_of(config))
    functions: list[Any] = [registries.attention.get(name) for name in names] if registries else []
    return [method for function in functions if (method := method_of_implementation(function))]


def method_of(config: Any) -> Method | None:
    """Returns the method with the most ranks among `methods_of` a config; None without one."""
    return max(methods_of(config), key=lambda method: method.shards, default=None)


def shards_of(config: Any) -> int:
    """Returns the number of ranks that share a sequence under a config's implementations; 1 without one of ours."""
    method = method_of(config)
    return 1 if method is None else method.shards


# The parts of a model.


def is_model(x: Any) -> bool:
    """Returns True for a model of transformers, or a model inside of one; False for layers."""
    return hasattr(type(x), "get_correct_attn_implementation")


def is_unsharded(module: nn.Module) -> bool:
    """Returns True for a submodel that selects another implementation."""
    registries, config = Registries.find(), getattr(module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if registries is None or name is None or not is_model(module):
        return False
    return not method_of_implementation(registries.attention.get(name))


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the named modules of a model, without parts that select another implementation."""
    unsharded = [name for name, module in model.named_modules() if module is not model and is_unsharded(module)]
    for name, module in model.named_modules():
        if not any(name == part or name.startswith(f"{part}.") for part in unsharded):
            yield name, module


def innermost_model(model: nn.Module, name: str) -> tuple[nn.Module, list[str]]:
    """Returns the innermost model of transformers that has the named module, or is it, and the path below it."""
    path = name.split(".") if name else []
    for depth in range(len(path), 0, -1):
        part = model.get_submodule(".".join(path[:depth]))
        if is_model(part):
            return part, path[depth:]
    return model, path  # the outermost model, though it may be none of transformers


# Checks of a model.

# Kinds of layers that mix tokens by attention alone, or not at all.
LAYERS = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention"} | {"moe", "sparse", "dense", "mlp"}
)

# Matches class names of modules that mix tokens by a recurrence or a convolution.
MIXERS = re.compile("Mamba|Rwkv|RWKV|LSTM|DeltaNet|LinearAttention|ShortConv|RgLru|Hyena|Retention|SSM")

# Matches class names of modules that select the keys of a query (DeepSeek, MiniMax), or compress them.
SELECTION = re.compile("Indexer|Compressor|Sparse[A-Za-z]*Attention|LSH")

# Attributes of modules that are True if embeddings depend on other tokens of the sequence, with the reason.
MIXING_SETTINGS = {
    "trigram_input": "gives each token the embeddings of its neighbours",  # MobileBERT
    "token_dropout": "scales embeddings by the count of masked tokens",  # ESM
}

# Matches class names of modules that compute embeddings of positions.
POSITION_MODULES = re.compile("Rotary|Position|Sinus")

# Name of the function by which RoBERTa and related models number tokens: from padding_idx + 1, padding left out.
POSITION_RULE = "create_position_ids_from_input_ids"

# The registry in which an attention module of transformers looks up the selected implementation.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

# Functions by which a module computes attention weights itself.
OWN_ATTENTION = frozenset({"softmax", "Softmax", "scaled_dot_product_attention"})

# Functions by which a model's own forward selects tokens of a row, such as that of a question (Splinter).
TOKEN_SELECTION = frozenset({"argmax", "gather"})

# Matches class names of modules that attend. Routers of experts call softmax too.
ATTENTION = re.compile("Attention|Attn")


def check_model(model: type, config: Any, *, uses_interface: bool = True) -> None:
    """Raises ValueError unless tokens of a class of models see each other by routed attention or sharded states.

    Args:
        uses_interface: False for a model whose layers compute attention themselves, and are routed.
    """
    states = has_sharded_states(model)  # unlike those of RWKV, xLSTM and Mamba-1
    kinds = check_layers(config, model.__name__, accept_states=states)
    if not kinds and not states and getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{model.__name__} carries a state along the sequence, which does not come from other ranks; only models "
            "whose tokens see each other by attention alone can be sharded"
        )
    if uses_interface and not _files_use_interface(model):  # Falcon, GPT-J, BLOOM
        raise ValueError(
            f"{model.__name__} computes attention itself, without transformers' attention interface: load it with "
            'attn_implementation="eager", for cp.prepare(model) to route layers that compute softmax(q kᵀ · scale + '
            'attention_mask) v, or name the parts to shard: attn_implementation={"text_config": ...}'
        )


def check_layers(config: Any, name: str | None = None, *, accept_states: bool) -> set[str]:
    """Returns the kinds of layers in a config; raises ValueError for kinds that do not see other ranks' tokens.

    Args:
        name: the model's name in the error; None for the name of the config's class.
        accept_states: True accepts layers with a state. `check_modules` then checks each of these layers.
    """
    kinds: set[str] = set()
    for field in ("layer_types", "layers_block_type"):
        kinds |= {str(kind) for kind in getattr(config, field, None) or ()}
    if unknown := sorted(kinds - LAYERS - (STATE_LAYERS if accept_states else frozenset[str]())):
        raise ValueError(
            f"{name or type(config).__name__} has layers of kind {', '.join(unknown)}, which do not see other ranks' "
            "tokens; only models whose tokens see each other by attention alone can be sharded"
        )
    return kinds


def check_layers_attend(model: nn.Module) -> None:
    """Checks the layers of a model that has selected our implementation, wholly or in part."""
    # transformers may set the implementation, such as that of a part of the config (MPT), although no layer uses it.
    modules = list(model.named_modules())
    # Of an image-text model that computes the attention of images itself, the text part alone has our implementation.
    if not any(
        (INTERFACE in _names_in_forward(module) or shards_states(type(module)) or is_routed(module))
        and not is_unsharded(innermost_model(model, name)[0])
        for name, module in modules
    ):
        check_model(type(model), getattr(model, "config", None))  # raises with the reason, if it knows one
        raise ValueError(
            f"{type(model).__name__} has no layer that calls transformers' attention interface, so nothing of it would "
            "see other ranks' tokens; only models whose tokens see each other by attention can be sharded"
        )
    check_own_attention(model, modules)


def check_modules(model: nn.Module, shards: int = 1) -> None:
    """Raises ValueError for modules that mix tokens other than by attention, whatever the config says.

    On several ranks also for modules that need the first token, other tokens' embeddings or global positions. Parts
    that select another implementation, such as the image tower, are not checked.
    """
    modules = list(sharded_modules(model))
    check_own_attention(model, modules)
    state_layers = {name for name, module in modules if shards_states(type(module))}
    for name, module in modules:
        # `route_states` replaces the functions of these layers. Such a layer does not call its convolution module, but
        # passes the module's weights to one of these functions.
        if name in state_layers or name.rpartition(".")[0] in state_layers:
            continue
        label = f"{type(model).__name__}.{name} ({type(module).__name__})"
        # Kernel size 1 is a linear layer. Image parts convolve in two or three dimensions, tokens' layers may, too.
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d) if _is_token_layer(model, name) else nn.Conv1d
        convolves = isinstance(module, convolutions) and set(module.kernel_size) != {1}
        # In files with sharded states the functions that a module calls decide, elsewhere the name of its class.
        if has_sharded_states(type(module)):
            mixes = mixes_unknown(type(module))
        else:
            mixes = MIXERS.search(type(module).__name__) is not None
        if convolves or isinstance(module, nn.RNNBase) or mixes:
            raise ValueError(
                f"{label} lets tokens see each other without attention, within each shard only; such a model cannot be "
                "sharded"
            )
        if shards == 1:
            continue
        if selects_keys(type(module)):
            raise ValueError(
                f"{label} selects keys for each query, among those of each shard only; such a model cannot be sharded"
            )
        for setting, use in MIXING_SETTINGS.items():
            if getattr(module, setting, False) is True:
                raise ValueError(f"{label} {use}, within each shard only: set {setting}=False in the config")
        counts_positions = POSITION_MODULES.search(type(module).__name__) is not None
        if counts_positions and "position_ids" not in signature(module.forward).parameters:
            raise ValueError(
                f"{label} takes no position_ids: it counts positions from the first token of each shard; modules that "
                "take them can be sharded"
            )


def check_own_attention(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for a layer of tokens, among a model's named modules, with own attention that is not routed."""
    for name, module in modules:
        if computes_attention(module) and _is_token_layer(model, name) and not is_routed(module):
            raise ValueError(
                f"{type(model).__name__}.{name} ({type(module).__name__}) computes attention itself, without "
                "transformers' attention interface, so its tokens would see those of their shard only; such a model "
                "cannot be sharded"
            )
        # A layer beside routed ones may compute attention in a way that is not recognized.
        layers = module if isinstance(module, nn.ModuleList) else ()
        unrouted = [i for i, layer in enumerate(layers) if not any(map(is_routed, layer.modules()))]
        if 0 < len(unrouted) < len(layers):
            raise ValueError(
                f"{type(model).__name__}.{name}: layers {unrouted} have no attention that is recognized, and others "
                "compute attention themselves; such a model cannot be sharded"
            )


def route_own_attentions(model: nn.Module) -> bool:
    """Routes the layers of tokens that compute attention themselves; returns True if there are any.

    Raises:
        ValueError: other layers do so, too, which may be of tokens and of images (FLAVA).
    """
    own = [(name, module) for name, module in model.named_modules() if computes_attention(module)]
    routable = [module for name, module in own if _is_token_layer(model, name) and can_be_routed(module)]
    other_names = [name for name, module in own if module not in routable and not is_routed(module)]
    if routable and other_names:
        raise ValueError(
            f"{type(model).__name__}.{other_names[0]} computes attention itself, without transformers' attention "
            "interface, and not as a layer of tokens, beside layers of tokens that do; such a model cannot be sharded"
        )
    for layer in routable:
        route_own_attention(layer)
    return any(is_routed(module) for _, module in own)


def computes_attention(module: nn.Module) -> bool:
    """Returns True if a module computes attention without transformers' attention interface."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if ATTENTION.search(type(module).__name__) is None:
        return False
    names = _names_in_forward(module)
    return INTERFACE not in names and not OWN_ATTENTION.isdisjoint(names)


def selects_keys(layer: type) -> bool:
    """Returns True for a class of modules that let a query see some of the keys, chosen by their scores."""
    if hasattr(layer, "get_correct_attn_implementation"):  # a model, such as MiniMaxM3SparseForConditionalGeneration
        return False
    methods = [unwrap(x) for x in vars(layer).values() if isinstance(x, FunctionType)]  # without torch.no_grad
    calls_topk = any("topk" in method.__code__.co_names for method in methods)  # as routers of experts do, too
    return SELECTION.search(layer.__name__) is not None or (calls_topk and "Attention" in layer.__name__)


@cache
def selects_tokens(model: type) -> bool:
    """Returns True for a class of models whose own forward selects tokens of a row, by their ids or scores."""
    return not TOKEN_SELECTION.isdisjoint(_names(_forwards_of(model), model, set()))


def _is_token_layer(model: nn.Module, name: str) -> bool:
    """Returns True for a module in a list of layers of a model that takes token ids, not of an image or audio part."""
    # Other modules, such as the projector of images, do not see the tokens of a shard.
    part, path = innermost_model(model, name)
    return "input_ids" in signature(part.forward).parameters and any(map(str.isdigit, path))


def padding_idx_of(model: nn.Module) -> int | None:
    """Returns padding_idx if the model's position ids start at padding_idx + 1 (RoBERTa), and None if they start at 0.

    Raises:
        ValueError: the model counts position ids by an unknown rule.
    """
    values: set[int] = set()
    for name, module in sharded_modules(model):
        counts = dict(module.named_buffers(recurse=False)).get("position_ids")
        if counts is not None and counts.numel() and not counts.is_meta and int(counts.flatten()[0]):
            raise ValueError(
                f"{type(model).__name__}.{name} ({type(module).__name__}) counts positions from "
                f"{int(counts.flatten()[0])}, which is unknown: 0 and padding_idx + 1 are accepted"
            )
        forward, padding_idx = unwrap(type(module).forward), getattr(module, "padding_idx", None)
        calls_rule = POSITION_RULE in getattr(getattr(forward, "__code__", None), "co_names", ())
        # ESM with rotary embeddings calls the function and does not use its result.
        is_absolute = getattr(module, "position_embedding_type", "absolute") == "absolute"
        if padding_idx is None or not calls_rule or not is_absolute:
            continue
        # Tries the function on (token, padding, token): a release of transformers may change it and keep its name.
        rule = getattr(module, POSITION_RULE, None) or forward.__globals__[POSITION_RULE]
        token = padding_idx + 1
        if rule(torch.tensor([[token, padding_idx, token]]), padding_idx).tolist() != [[token, padding_idx, token + 1]]:
            raise ValueError(f"{type(module).__name__}.{POSITION_RULE} does not count tokens from padding_idx + 1")
        values.add(padding_idx)
    if len(values) > 1:
        raise ValueError(
            f"{type(model).__name__} counts position ids after padding_idx {sorted(values)}; one is needed"
        )
    return values.pop() if values else None


# The code of a model.


def _files_use_interface(model: type) -> bool:
    """Returns False if the files of a class define attention without transformers' attention interface."""
    # An attention class in a user's file may inherit from one in transformers, so the files of all bases are read.
    for base in model.__mro__:
        if base.__module__ == "transformers.modeling_utils":
            return False  # reached PreTrainedModel: no file of the model's own classes uses the interface
        try:
            source = getsource(sys.modules[base.__module__])
        except (KeyError, OSError, TypeError):  # no source, as in a notebook: only the checks at each call remain
            return True
        if INTERFACE in source or not re.search(r"^class \w*Attention\w*\(", source, re.MULTILINE):
            return True
    return True


def _names_in_forward(module: nn.Module) -> set[str]:
    """Returns the names in a module's forward and in the functions of its file, or of a user's, that it calls."""
    # `_names` follows a wrapper, set on a class or on one module, to the function that it wraps.
    return set(_names([vars(module).get("forward"), *_forwards_of(type(module))], type(module), set()))


def _forwards_of(module: type) -> list[Any]:
    # Calls of super() reach the forwards of all bases.
    return [vars(base).get("forward") for base in module.__mro__ if base is not nn.Module]


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
        own_callees = [
            callee
            for callee in callees
            if isinstance(callee, FunctionType)
            and (
                callee.__module__ == function.__module__
                or str(callee.__module__).split(".")[0] not in ("torch", "transformers")
            )
        ]
        yield from _names(own_callees, owner, visited)


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)
