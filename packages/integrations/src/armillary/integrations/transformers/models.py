"""Checks of models of Hugging Face transformers: those that cannot run on a shard are refused early.

A model that is given an implementation of ours, when it is built or later, asks `get_correct_attn_implementation`
whether it is there. No registry is asked about the model; so that method is wrapped, once. The loss is wrapped too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import getsource, signature, unwrap
from typing import Any

import torch
from torch import nn

from armillary.attention.context_parallel.registries import Registries, method_of_implementation
from armillary.attention.methods.base import Method

LAYERS = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention"} | {"moe", "sparse", "dense", "mlp"}
)
"""Kinds of layers that mix tokens by attention alone, or not at all."""


MIXERS = re.compile("Mamba|Rwkv|RWKV|LSTM|DeltaNet|LinearAttention|ShortConv|RgLru|Hyena|Retention|SSM")
"""In the names of modules that do so without a module of torch's."""

MIXING_SETTINGS = {
    "trigram_input": "gives each token the embeddings of its neighbours",  # MobileBERT
    "token_dropout": "scales embeddings by the count of masked tokens",  # ESM
}
"""Attributes of modules that are True where these use other tokens of the sequence, and how."""

POSITION_MODULES = re.compile("Rotary|Position|Sinus")
"""In the names of modules that compute embeddings of positions."""

POSITION_RULE = "create_position_ids_from_input_ids"
"""Name of the function by which RoBERTa and its kin number tokens: from padding_idx + 1, without padding."""

MARK = "armillary_checks_sharding"


def wrap_models(models: Any) -> None:
    """Has every model of `transformers.modeling_utils` checked that is given an implementation of ours."""
    base = models.PreTrainedModel
    if hasattr(base.get_correct_attn_implementation, MARK):
        return
    choose, loss = base.get_correct_attn_implementation, base.loss_function

    @wraps(choose)
    def checked(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if method_of_implementation(models.ALL_ATTENTION_FUNCTIONS.get(requested_attention)):
            check_model(type(model), model.config)
            if computes_loss(type(model)) and _refuse_labels not in model._forward_pre_hooks.values():
                model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
        return choose(model, requested_attention, *args, **kwargs)

    def loss_function(model: Any) -> Callable[..., Any]:
        chosen, shards = loss.fget(model), shards_of(model.config)
        return chosen if shards == 1 or hasattr(model, "_loss_function") else partial(_loss, chosen, model.config)

    setattr(checked, MARK, True)
    base.get_correct_attn_implementation = checked
    base.loss_function = property(loss_function, loss.fset)


def check_model(model: type, config: Any) -> None:
    """Refuses models whose tokens see each other by other means than the attention function that we replace.

    Raises:
        ValueError: it carries a state along the sequence (Mamba, RWKV, xLSTM), has layers of an unknown kind, or
            computes attention by itself (Falcon, GPT-J, BLOOM).
    """
    kinds = check_layers(config, model.__name__)
    if not kinds and getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{model.__name__} carries a state along the sequence, which does not come from other ranks; only models "
            "whose tokens see each other by attention alone can be sharded so"
        )
    if not calls_attention(model):
        raise ValueError(
            f"{model.__name__} computes attention by itself, without transformers' attention interface, so that no "
            'attn_implementation but its own can be used: keep "eager" or "sdpa", outside of register_transformers, or '
            'name the parts that are sharded: attn_implementation={"text_config": ...}'
        )


def check_layers(config: Any, name: str | None = None) -> set[str]:
    """The kinds of layers that a config names; refuses those that do not see other ranks' tokens."""
    kinds: set[str] = set()
    for field in ("layer_types", "layers_block_type"):
        kinds |= {str(kind) for kind in getattr(config, field, None) or ()}
    if others := sorted(kinds - LAYERS):
        raise ValueError(
            f"{name or type(config).__name__} has layers of kind {', '.join(others)}, which do not see other ranks' "
            "tokens; only models whose tokens see each other by attention alone can be sharded so"
        )
    return kinds


def check_modules(model: nn.Module, shards: int = 1) -> None:
    """Refuses a model with modules that mix tokens along the sequence, whatever its config says.

    Parts with an implementation of their own that is none of ours, such as the tower of images, are left out.
    """
    for name, module in sharded_modules(model):
        convolves = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if convolves or isinstance(module, nn.RNNBase) or MIXERS.search(type(module).__name__):
            raise ValueError(
                f"{type(model).__name__}.{name} ({type(module).__name__}) lets tokens see each other without "
                "attention, within each shard only; such a model cannot be sharded so"
            )
        if shards > 1:
            _check_sharded(f"{type(model).__name__}.{name} ({type(module).__name__})", module)


def _check_sharded(name: str, module: nn.Module) -> None:
    """Refuses a module that is right on one rank only."""
    if type(module).__name__.endswith("Pooler"):
        raise ValueError(
            f"{name} takes the first token of each shard for that of the sequence: make the model with "
            "add_pooling_layer=False"
        )
    for setting, use in MIXING_SETTINGS.items():
        if getattr(module, setting, False) is True:
            raise ValueError(f"{name} {use}, within each shard only: set {setting}=False in the config")
    if POSITION_MODULES.search(type(module).__name__) and "position_ids" not in signature(module.forward).parameters:
        raise ValueError(
            f"{name} takes no position_ids: it counts positions from the first token of each shard; modules that take "
            "them can be sharded"
        )


def padding_idx_of(model: nn.Module) -> int | None:
    """Returns the padding_idx after which a model counts position ids (RoBERTa and its kin); None if it counts from 0.

    Raises:
        ValueError: the model makes position ids by a rule that is not known.
    """
    values = {padding_idx for _, module in sharded_modules(model) if (padding_idx := _padding_idx(module)) is not None}
    if len(values) > 1:
        raise ValueError(
            f"{type(model).__name__} counts position ids after padding_idx {sorted(values)}; one is needed"
        )
    return values.pop() if values else None


def _padding_idx(module: nn.Module) -> int | None:
    """Returns the padding_idx after which a module counts position ids; None if it makes none."""
    forward, padding_idx = unwrap(type(module).forward), getattr(module, "padding_idx", None)
    calls_rule = POSITION_RULE in getattr(getattr(forward, "__code__", None), "co_names", ())
    # ESM with rotary embeddings calls the function and does not use its result.
    if padding_idx is None or not calls_rule or getattr(module, "position_embedding_type", "absolute") != "absolute":
        return None
    rule = getattr(module, POSITION_RULE, None) or forward.__globals__[POSITION_RULE]
    other = padding_idx + 1
    if rule(torch.tensor([[other, padding_idx, other]]), padding_idx).tolist() != [[other, padding_idx, other + 1]]:
        raise ValueError(f"{type(module).__name__}.{POSITION_RULE} does not count tokens from padding_idx + 1")
    return padding_idx


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the named modules of a model, without parts that attend by an implementation that is none of ours."""
    names = [name for name, module in model.named_modules() if module is not model and _is_elsewhere(module)]
    for name, module in model.named_modules():
        if not any(name == part or name.startswith(f"{part}.") for part in names):
            yield name, module


def _is_elsewhere(module: nn.Module) -> bool:
    """Returns whether a submodel attends by another implementation than ours."""
    found, config = Registries.imported(), getattr(module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    is_model = hasattr(type(module), "get_correct_attn_implementation")
    return (
        is_model and found is not None and name is not None and not method_of_implementation(found.attention.get(name))
    )


def calls_attention(model: type) -> bool:
    """Returns whether the source of a class or of its bases uses the interface, has no attention or is unknown."""
    for part in model.__mro__:
        if part.__module__ == "transformers.modeling_utils":
            return False
        try:
            source = getsource(sys.modules[part.__module__])
        except (KeyError, OSError, TypeError):
            return True
        if "ALL_ATTENTION_FUNCTIONS" in source or not re.search(r"^class \w*Attention\w*\(", source, re.MULTILINE):
            return True
    return True


def computes_loss(model: type) -> bool:
    """Returns whether a class computes its loss without transformers' loss function (Whisper's decoder)."""
    try:
        source = getsource(unwrap(model.forward))
    except (OSError, TypeError):
        return False
    return "labels" in source and "loss_function" not in source


def _refuse_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before `forward` of a model that `computes_loss`.

    Raises:
        ValueError: there are labels, and other ranks have more of them.
    """
    if kwargs.get("labels") is not None and shards_of(model.config) > 1:
        raise ValueError(
            f"{type(model).__name__} computes its loss by itself, as a mean over the labels of this shard alone: leave "
            "labels out, and divide the sum of the losses of its logits by the number of all ranks' labels"
        )


ROUTERS = (
    "output_router_logits=True: the routers' auxiliary loss is not linear in the tokens, so that those of shards do "
    "not add up to the sequence's; set it to False (router_aux_loss_coef=0.0 in TRL's config)"
)


def shards_of(config: Any) -> int:
    """The ranks that share a sequence under an implementation of ours that a config or a part names; 1 without one."""
    return max((method.shards for method in methods_of(config)), default=1)


def methods_of(config: Any) -> list[Method]:
    """The methods behind the implementations of ours that a config or a part names."""
    found = Registries.imported()
    names = dict.fromkeys(getattr(part, "_attn_implementation", None) for part in parts_of(config))
    functions: list[Any] = [found.attention.get(name) for name in names] if found else []
    return [method for function in functions if (method := method_of_implementation(function))]


def parts_of(config: Any) -> list[Any]:
    """A config and those of its text, vision or audio parts."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    return [config, *(part for part in parts if part is not None)]


def _loss(chosen: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """A model's own loss, refused where that of a shard would be another than its share of the sequence's.

    Raises:
        ValueError: labels that the model would shift within the shard, a mean over the shard's labels alone, a loss of
            something else than the next token, or an auxiliary loss, which is no sum over tokens.
    """
    if "shift_labels" not in signature(chosen).parameters:
        raise ValueError(
            f"{getattr(chosen, '__name__', chosen)} takes no shift_labels: it is no loss of the next token, which is "
            "the only one that a shard is given labels for"
        )
    missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
    if missing:
        raise ValueError(
            f"the loss of a shard needs {' and '.join(missing)}: labels are shifted before they are sharded, and the "
            "sum of losses is divided by the count of all ranks. `cp.shard(ids).inputs` has both"
        )
    if any(getattr(part, "output_router_logits", False) for part in parts_of(config)):
        raise ValueError(ROUTERS)
    return chosen(*args, **kwargs)
