"""Checks of models of Hugging Face transformers: a model that cannot run on shards raises an error.

The class and the config are checked when the model selects our implementation, its modules at the first call.
transformers has no hook for this. But a model that selects an attention implementation, when it is built or later,
calls `get_correct_attn_implementation`. `wrap_models` wraps this method and the property `loss_function`, once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from inspect import getsource, isfunction, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn

from armillary.attention.parts import method_of_implementation
from armillary.core.parts import compat
from armillary.integrations.transformers.interface import (
    calls_interface,
    check_own_attention,
    innermost_model,
    is_unsharded,
    method_of,
    parts_of,
    sharded_modules,
    shards_of,
)
from armillary.integrations.transformers.positions import (
    check_image_positions,
    depends_on_last_position,
    give_last_position,
    repeats_positions,
)
from armillary.integrations.transformers.row_outputs import (
    LOSS_CHECKED,
    check_outputs,
    find_row_ends,
    refuse_kept_logits,
    scores_row_ends,
)
from armillary.integrations.transformers.states import (
    STATE_LAYERS,
    StateHook,
    has_sharded_states,
    mixes_unknown,
    route_states,
    shards_states,
)

LAYERS = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention"} | {"moe", "sparse", "dense", "mlp"}
)
"""Kinds of layers that mix tokens by attention alone, or not at all."""


MIXERS = re.compile("Mamba|Rwkv|RWKV|LSTM|DeltaNet|LinearAttention|ShortConv|RgLru|Hyena|Retention|SSM")
"""Matches class names of modules that mix tokens by a recurrence or a convolution."""

MIXING_SETTINGS = {
    "trigram_input": "gives each token the embeddings of its neighbours",  # MobileBERT
    "token_dropout": "scales embeddings by the count of masked tokens",  # ESM
}
"""Attributes of modules that are True if embeddings depend on other tokens of the sequence, with the reason."""

POSITION_MODULES = re.compile("Rotary|Position|Sinus")
"""Matches class names of modules that compute embeddings of positions."""

POSITION_RULE = "create_position_ids_from_input_ids"
"""Name of the function by which RoBERTa and related models number tokens: from padding_idx + 1, padding left out."""

MARK = "armillary_checks_sharding"
"""Attribute of the wrapper, so that a second registration does not wrap it again."""


def wrap_models(models: Any) -> None:
    """Makes `transformers.modeling_utils` check every model that selects one of our implementations."""
    base = models.PreTrainedModel
    if hasattr(base.get_correct_attn_implementation, MARK):
        return
    choose, loss = base.get_correct_attn_implementation, base.loss_function

    @wraps(choose)
    def check_and_choose(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        # Models with other implementations, such as image towers, are not checked.
        if method_of_implementation(models.ALL_ATTENTION_FUNCTIONS.get(requested_attention)):
            check_model(type(model), model.config)
            # Parts with the config of their model (Mamba2Model in Mamba2ForCausalLM) are not asked to choose.
            for part in model.modules():
                if isinstance(part, base) and has_sharded_states(type(part)):
                    route_states(type(part))
                    hook_once(part, StateHook(check_modules))
            ropes = [getattr(part, "rope_parameters", None) for part in parts_of(model.config)]
            if depends_on_last_position(ropes):
                hook_once(model, give_last_position)
            hook_once(model, _before_forward)
            if _check_outputs not in model._forward_hooks.values():
                model.register_forward_hook(_check_outputs, with_kwargs=True)
            if repeats_positions(type(model)):
                hook_once(model, check_image_positions)
            if computes_loss(type(model)):
                hook_once(model, _refuse_labels)
        return choose(model, requested_attention, *args, **kwargs)

    def loss_function(model: Any) -> Callable[..., Any]:
        function = loss.fget(model)
        # Only users set `_loss_function`. A user's loss is not checked.
        unchecked = shards_of(model.config) == 1 or hasattr(model, "_loss_function")
        return function if unchecked else partial(_checked_loss, function, model)

    setattr(check_and_choose, MARK, True)
    base.get_correct_attn_implementation = check_and_choose
    base.loss_function = property(loss_function, loss.fset)


def hook_once(model: Any, hook: Any) -> None:
    """Registers a pre-forward hook, unless the model has this function, or an object of this class, already.

    A model may select an implementation several times.
    """
    hooks = model._forward_pre_hooks.values()
    if not any(other is hook or (type(other) is type(hook) and not isfunction(hook)) for other in hooks):
        model.register_forward_pre_hook(hook, with_kwargs=True)


def check_model(model: type, config: Any) -> None:
    """Checks a class of models: its tokens must see each other only by the routed attention or by sharded states.

    Raises:
        ValueError: it carries a state along the sequence by other functions than those of `states.py` (RWKV, xLSTM,
            Mamba-1), has layers of an unknown kind, or computes attention itself (Falcon, GPT-J, BLOOM).
    """
    states = has_sharded_states(model)
    kinds = check_layers(config, model.__name__, accept_states=states)
    if not kinds and not states and getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{model.__name__} carries a state along the sequence, which does not come from other ranks; only models "
            "whose tokens see each other by attention alone can be sharded"
        )
    if not calls_attention(model):
        raise ValueError(
            f"{model.__name__} computes attention itself, without transformers' attention interface, so only its own "
            'attn_implementation works: keep "eager" or "sdpa", without context parallelism, or name the parts to '
            'shard: attn_implementation={"text_config": ...}'
        )


def check_layers_attend(model: nn.Module) -> None:
    """Checks the layers of a model that has selected our implementation, wholly or in part.

    Raises:
        ValueError: no layer calls transformers' attention interface or has a state that can be sharded, although
            transformers has set the implementation, such as that of a part of the config (MPT); a layer of tokens
            computes attention itself.
    """
    modules = list(model.named_modules())
    # Of an image-text model that computes the attention of images itself, the text part alone has our implementation.
    if not any(
        (calls_interface(module) or shards_states(type(module))) and not is_unsharded(innermost_model(model, name)[0])
        for name, module in modules
    ):
        check_model(type(model), getattr(model, "config", None))  # raises with the reason, if it knows one
        raise ValueError(
            f"{type(model).__name__} has no layer that calls transformers' attention interface, so nothing of it would "
            "see other ranks' tokens; only models whose tokens see each other by attention can be sharded"
        )
    check_own_attention(model, modules)


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
        convolves = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)  # kernel size 1 is a linear layer
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
        if shards > 1:
            _check_sharded(label, module)


def _check_sharded(label: str, module: nn.Module) -> None:
    """Raises ValueError for a module whose results are wrong if a sequence is on several ranks."""
    for setting, use in MIXING_SETTINGS.items():
        if getattr(module, setting, False) is True:
            raise ValueError(f"{label} {use}, within each shard only: set {setting}=False in the config")
    if POSITION_MODULES.search(type(module).__name__) and "position_ids" not in signature(module.forward).parameters:
        raise ValueError(
            f"{label} takes no position_ids: it counts positions from the first token of each shard; modules that take "
            "them can be sharded"
        )


def padding_idx_of(model: nn.Module) -> int | None:
    """Returns padding_idx if the model's position ids start at padding_idx + 1 (RoBERTa), and None if they start at 0.

    Raises:
        ValueError: the model counts position ids by an unknown rule.
    """
    values = {padding_idx for _, module in sharded_modules(model) if (padding_idx := _padding_idx(module)) is not None}
    if len(values) > 1:
        raise ValueError(
            f"{type(model).__name__} counts position ids after padding_idx {sorted(values)}; one is needed"
        )
    return values.pop() if values else None


def _padding_idx(module: nn.Module) -> int | None:
    """Returns padding_idx if a module makes position ids that start at padding_idx + 1, and None if it makes none."""
    forward, padding_idx = unwrap(type(module).forward), getattr(module, "padding_idx", None)
    calls_rule = POSITION_RULE in getattr(getattr(forward, "__code__", None), "co_names", ())
    # ESM with rotary embeddings calls the function and does not use its result.
    if padding_idx is None or not calls_rule or getattr(module, "position_embedding_type", "absolute") != "absolute":
        return None
    # Tries the function on (token, padding, token), because a release of transformers may change it and keep its name.
    rule = getattr(module, POSITION_RULE, None) or forward.__globals__[POSITION_RULE]
    token = padding_idx + 1
    if rule(torch.tensor([[token, padding_idx, token]]), padding_idx).tolist() != [[token, padding_idx, token + 1]]:
        raise ValueError(f"{type(module).__name__}.{POSITION_RULE} does not count tokens from padding_idx + 1")
    return padding_idx


def calls_attention(model: type) -> bool:
    """Returns False if the source of a class defines attention without transformers' attention interface."""
    # An attention class in a user's file may inherit from one in transformers, so the files of all bases are read.
    for base in model.__mro__:
        if base.__module__ == "transformers.modeling_utils":
            return False  # reached PreTrainedModel: no file of the model's own classes uses the interface
        try:
            source = getsource(sys.modules[base.__module__])
        except (KeyError, OSError, TypeError):  # no source, as in a notebook: only the checks at each call remain
            return True
        if "ALL_ATTENTION_FUNCTIONS" in source or not re.search(r"^class \w*Attention\w*\(", source, re.MULTILINE):
            return True
    return True


def computes_loss(model: type) -> bool:
    """Returns True if a class computes its loss without transformers' loss function, as Whisper's decoder does."""
    try:
        source = getsource(unwrap(model.forward))
    except (OSError, TypeError):
        return False
    return "labels" in source and "loss_function" not in source and not scores_row_ends(model)


@compat.never_traced
def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model on several ranks: refuses to keep some logits, and finds the ends of scored rows."""
    method = method_of(model.config)
    if method is None or method.shards == 1:
        return
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        refuse_kept_logits(keep, method)
    if scores_row_ends(type(model)):
        find_row_ends(method, model, args, kwargs)


@compat.never_traced
def _check_outputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a model: `check_outputs` on several ranks."""
    method = method_of(model.config)
    if method is not None and method.shards > 1:
        check_outputs(method, model, args, kwargs, output)


SHIFTED_LABELS = re.compile(r"labels\[[^\]]*\b1 ?:")
"""Matches `labels[..., 1:]` in the forward of a model that shifts labels itself."""


def predicts_next_token(model: nn.Module) -> bool:
    """Returns False if the labels of a model are not those of the next tokens: masked LMs, classification of tokens.

    A model without a loss counts as one that predicts the next token. `loss_type` decides, by which transformers
    selects a model's loss function, or the source of a model that computes its loss itself.
    """
    # Wrappers such as PEFT's have no loss of their own.
    models = (module for module in model.modules() if hasattr(type(module), "get_correct_attn_implementation"))
    inner: Any = next(models, None)
    forward = None if inner is None else unwrap(type(inner).forward)
    code = getattr(forward, "__code__", None)
    names: tuple[str, ...] = () if code is None else (*code.co_varnames, *code.co_names)
    if forward is None or "labels" not in names or not any("loss" in name for name in names):
        return True
    if computes_loss(type(inner)):
        return SHIFTED_LABELS.search(getsource(forward)) is not None
    function = import_module("transformers.loss.loss_utils").LOSS_MAPPING.get(getattr(inner, "loss_type", None))
    return function is None or "shift_labels" in signature(function).parameters  # None: the loss of the next token


def _refuse_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook that raises ValueError for labels given to a model that `computes_loss`, on several ranks."""
    if kwargs.get("labels") is not None and shards_of(model.config) > 1:
        raise ValueError(
            f"{type(model).__name__} computes its loss itself, as a mean over the labels of this shard alone: do not "
            "pass labels, and give its logits to cp.loss"
        )


ROUTER_LOSS_ERROR = (
    "output_router_logits=True: the routers' auxiliary loss is not linear in the tokens, so losses of shards do not "
    "add up to that of the sequence; set it to False (router_aux_loss_coef=0.0 in TRL's config)"
)


def _checked_loss(function: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a model's own loss, if the losses of shards add up to the loss of the sequence.

    Raises:
        ValueError: labels that the model would shift within the shard, a mean over the shard's labels alone, a loss
            that does not predict the next token, or an auxiliary loss, which is not a sum over tokens.
    """
    if scores_row_ends(type(model)):
        return function(*args, **kwargs)  # from scores and labels of whole rows
    if "shift_labels" not in signature(function).parameters:
        raise ValueError(
            f"{getattr(function, '__name__', function)} takes no shift_labels: a shard has labels only for a loss of "
            "the next token"
        )
    missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
    if missing:
        raise ValueError(
            f"the loss of a shard needs {' and '.join(missing)}: labels are shifted before they are sharded, and the "
            "sum of losses is divided by the count of all ranks. `cp.shard(ids).inputs` has both"
        )
    if any(getattr(part, "output_router_logits", False) for part in parts_of(model.config)):
        raise ValueError(ROUTER_LOSS_ERROR)
    setattr(model, LOSS_CHECKED, True)
    return function(*args, **kwargs)
