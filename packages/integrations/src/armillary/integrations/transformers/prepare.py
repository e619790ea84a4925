"""Hugging Face transformers: an attention implementation that unmodified models select by name.

`register_transformers` puts our mask function and our attention function (`attn_implementation.py`) into the registries
of transformers, and adds checks and hooks to each model that selects them. `prepare_transformers` does so for one model
under a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from inspect import isfunction, signature
from typing import Any

from torch import nn

from armillary.attention import ContextParallel, Method
from armillary.attention.internal import check_method, method_of_implementation
from armillary.integrations.transformers.attn_implementation import Implementation, StateHook
from armillary.integrations.transformers.latents import send_latents
from armillary.integrations.transformers.models import (
    check_layers_attend,
    check_model,
    is_model,
    methods_of,
    padding_idx_of,
    parts_of,
    route_own_attentions,
    shards_of,
)
from armillary.integrations.transformers.outputs import (
    add_output_check,
    checked_loss,
    find_row_ends,
    predicts_next_token,
)
from armillary.integrations.transformers.positions import (
    check_image_positions,
    depends_on_last_position,
    give_last_position,
    give_positions,
    repeats_positions,
)
from armillary.integrations.transformers.recurrent_layers import has_sharded_states, route_states
from armillary.integrations.versions import check_version

# Attribute of the wrapper, so that a second registration does not wrap it again.
MARK = "armillary_checks_sharding"


def prepare_transformers(model: Any, cp: ContextParallel) -> None:
    """Makes a model of transformers attend by the method of `cp`; `ContextParallel.prepare` calls it.

    Other models are not affected. Sets `cp.padding_idx` and `cp.shifts_labels` for the model. The model makes no KV
    cache, unless a call asks for one; its config is saved as it was.

    Raises:
        ValueError: as `register_transformers` when a model selects the implementation; a model without a layer whose
            attention can be routed (FNet, XLM), or with other layers that attend beside those; a model that counts
            position ids by an unknown rule, or otherwise than one that `cp` has prepared before.
    """
    # Each method is registered under its own name, so that models with different methods can run side by side.
    name = f"armillary-{type(cp.method).__name__.lower()}-{id(cp.method):x}"
    register_transformers(cp.method, name)
    if route_own_attentions(model):  # transformers would not set the implementation of such a model
        check_model(type(model), model.config, uses_interface=False)
        for part in filter(is_model, model.modules()):
            part.config._attn_implementation = name
        add_hooks(model)
    else:
        model.set_attn_implementation(name)
    # transformers only logs a warning for a model without the attention interface, and leaves it unchanged.
    if not any(method is cp.method for method in methods_of(model.config)):
        check_model(type(model), model.config)  # raises with the reason, if it knows one
        raise ValueError(f"{type(model).__name__}: transformers cannot set its attention implementation")
    disable_caches(model)
    send_latents(model, name)
    check_layers_attend(model)
    cp.count_positions_as(model, padding_idx_of(model))
    # A `ContextParallel` may prepare several models: none of them may get labels that are shifted and should not be.
    cp.shifts_labels = cp.shifts_labels and predicts_next_token(model)


def disable_caches(model: nn.Module) -> None:
    """Makes the parts of a model that attend over shards use no KV cache, unless a call asks for one."""
    # By hooks, because the config is saved with the model.
    modules: Iterator[Any] = model.modules()
    for module in modules:
        parameters = list(signature(type(module).forward).parameters) if is_model(module) else []
        if "use_cache" in parameters:
            hook_once(module, UncachedCall(parameters.index("use_cache") - 1))  # without self


class UncachedCall:
    """Pre-forward hook that sets `use_cache` to False in calls that leave it to the config."""

    def __init__(self, position: int) -> None:
        self.position = position  # index of `use_cache` among positional arguments

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_default = len(args) <= self.position and kwargs.get("use_cache") is None
        # The model may have another implementation by now, for example to generate.
        if is_default and methods_of(model.config):
            return args, {**kwargs, "use_cache": False}
        return None


def register_transformers(attend: Method, name: str = "armillary") -> None:
    """Makes `attend` the attention implementation `name` of Hugging Face transformers.

        register_transformers(cp.method)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="armillary")
        with cp.shard(ids) as batch:
            loss = cp.loss(model(**batch.inputs).loss, batch)
        loss.backward()

    `cp.prepare(model)` registers and selects an implementation for one model, and reads its padding_idx. Call
    `register_transformers` to shard only one part of a model (`attn_implementation={"text_config": "armillary"}`).
    Registering another method under the same name replaces the first, for existing models too.

    Every rank has all parameters (or FSDP's shard of them). Each layer keeps its own mask, which is read from the
    model's mask functions: windows, chunks, images whose tokens see each other, or no mask at all. A mask given to
    `sequence(mask=...)` replaces it. The model passes softcap and sinks. Layers with a state (Mamba-2, the gated delta
    rule, Kimi's delta attention, short convolutions) take the documents or tree given to `sequence`; they refuse a
    striped layout.

    Documents of packed rows are those of `sequence(documents=...)`. If none are given there, they are read from
    cu_seq_lens_q of the whole sequence, or else from position ids that restart at 0 (or padding_idx + 1). With
    documents from `sequence`, position ids may start anywhere and skip positions, as long as they rise within each
    document. Bidirectional models and models with M-RoPE's position ids [3, B, T] take no documents from position ids;
    if none are given otherwise, each row is one document, as in transformers.

    Run the model's forward inside `with sequence(...)`, or inside `with batch`, which is the same. Run backward inside
    it, too, if the whole model is one activation checkpoint.

    Bytes sent in addition to the method's: the position ids of all tokens to each rank, for each new position_ids
    tensor (create the tensor once, not in every step); two integers for an attention_mask that was not given to
    `cp.shard`; the token types of models with images; the states of `gated_delta_rule`, `ssd` and `short_convolution`.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `attend` is no method; a release of transformers that is not tested, as `check_version` says.
            When a model selects the implementation: its tokens see each other in other ways (Mamba-1, RWKV, other
            linear attention), or it computes attention itself, which `cp.prepare` may route (Falcon, GPT-J).
            At a call, in the model: modules that mix tokens in other ways (convolutions, MobileBERT's `trigram_input`,
            ESM's `token_dropout`), a pooler of the first token, positions that the model counts itself, an unknown mask
            function, a mask tensor that the model made, a layer whose window or causality differs from its mask's.
            At a call, in its arguments: cross-attention, a filled KV cache, attention dropout, attention weights as
            output and other options that may change attention; several ranks without a layout; an attention_mask that
            hides tokens and was not given to `cp.shard`; position ids that are missing, do not fit the layout or are
            below the model's first position (`padding_idx` + 1), or [B, T] beside images in a model with M-RoPE;
            position ids of several documents for a bidirectional model; labels without shift_labels and
            num_items_in_batch, or for a loss that does not predict the next token; labels with output_router_logits; a
            loss that the model computes itself, or to which it adds terms.
            Raised on every rank, except for arguments that are wrong on one rank only.
    """
    check_method(attend)
    check_version("transformers")
    masks, models = import_module("transformers.masking_utils"), import_module("transformers.modeling_utils")
    implementation = Implementation(attend)
    models.ALL_ATTENTION_FUNCTIONS.register(name, implementation.attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(name, implementation.mask)
    wrap_models(models)


def wrap_models(models: Any) -> None:
    """Makes `transformers.modeling_utils` check every model that selects one of our implementations."""
    base = models.PreTrainedModel
    if hasattr(base.get_correct_attn_implementation, MARK):
        return
    choose, select, loss = base.get_correct_attn_implementation, base.set_attn_implementation, base.loss_function
    complete = base.post_init

    @wraps(choose)
    def check_and_choose(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        # Models with other implementations, such as image towers, are not checked.
        if method_of_implementation(models.ALL_ATTENTION_FUNCTIONS.get(requested_attention)):
            check_model(type(model), model.config)
        return choose(model, requested_attention, *args, **kwargs)

    # A model around the parts that select our implementation has positions, outputs and losses of its own, and need not
    # select any (Granite Speech). All parts have their hooks once a model is complete, and after a later selection.
    @wraps(complete)
    def complete_with_hooks(model: Any) -> None:
        complete(model)
        add_hooks(model)

    @wraps(select)
    def select_with_hooks(model: Any, *args: Any, **kwargs: Any) -> None:
        select(model, *args, **kwargs)
        add_hooks(model)

    def loss_function(model: Any) -> Callable[..., Any]:
        function = loss.fget(model)
        # Only users set `_loss_function`. A user's loss is not checked.
        unchecked = shards_of(model.config) == 1 or hasattr(model, "_loss_function")
        return function if unchecked else partial(checked_loss, function, model)

    setattr(check_and_choose, MARK, True)
    base.get_correct_attn_implementation = check_and_choose
    base.post_init, base.set_attn_implementation = complete_with_hooks, select_with_hooks
    base.loss_function = property(loss_function, loss.fset)


def add_hooks(model: nn.Module) -> None:
    """Adds checks and hooks to each model of transformers in a model of which a part selects our implementation."""
    for part in filter(is_model, model.modules()):
        if methods_of(part.config):
            add_hooks_of_model(part)


def add_hooks_of_model(model: Any) -> None:
    if has_sharded_states(type(model)):
        route_states(type(model))
        hook_once(model, StateHook())
    ropes = [getattr(part, "rope_parameters", None) for part in parts_of(model.config)]
    if depends_on_last_position(ropes):
        hook_once(model, give_last_position)
    hook_once(model, give_positions)
    hook_once(model, find_row_ends)
    add_output_check(model)
    if repeats_positions(type(model)):
        hook_once(model, check_image_positions)


def hook_once(model: Any, hook: Any) -> None:
    # A model may select an implementation several times. Hooks are functions, or objects of one class each.
    hooks = model._forward_pre_hooks.values()
    if not any(other is hook or (type(other) is type(hook) and not isfunction(hook)) for other in hooks):
        model.register_forward_pre_hook(hook, with_kwargs=True)
