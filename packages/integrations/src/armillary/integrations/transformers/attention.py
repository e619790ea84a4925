"""Hugging Face transformers: an attention implementation that unmodified models select by name.

A model first creates a mask for each kind of layer, then passes it to every layer of that kind. Our mask function
returns a `ShardMask` with the layout given to `with sequence(...)` and the documents. It communicates, and is never
part of a compiled graph, so that layers can be compiled. When backward recomputes a layer, in
any thread, the layer therefore has the same layout and documents as in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from armillary.attention import AttentionMask, ContextParallel, Method
from armillary.attention.parts import (
    SequenceContext,
    ShardedImplementation,
    check_method,
    current_sequence,
    gather_integers,
)
from armillary.core.parts import compat
from armillary.integrations.transformers.callers import (
    boundaries_of,
    calling_functions,
    calling_module,
    position_ids_of,
)
from armillary.integrations.transformers.documents import DocumentReader, GroupReader, known_documents
from armillary.integrations.transformers.interface import methods_of
from armillary.integrations.transformers.masks import rule_of
from armillary.integrations.transformers.models import (
    ROUTER_LOSS_ERROR,
    check_layers,
    check_layers_attend,
    check_model,
    check_modules,
    hook_once,
    padding_idx_of,
    predicts_next_token,
    wrap_models,
)
from armillary.integrations.transformers.positions import scale_by_position
from armillary.integrations.transformers.shard_mask import ShardMask
from armillary.integrations.transformers.states import OPTION, has_sharded_states


def prepare_transformers(model: Any, cp: ContextParallel) -> None:
    """Makes a model of transformers attend by the method of `cp`; `ContextParallel.prepare` calls it.

    Other models are not affected. Sets `cp.padding_idx` and `cp.shifts_labels` for the model. The model makes no KV
    cache, unless a call asks for one; its config is saved as it was.

    Raises:
        ValueError: as `register_transformers` when a model selects the implementation; a model without a layer that
            calls transformers' attention interface (MPT, FNet), or with layers of tokens that compute attention
            themselves (GIT); a model that counts position ids by an unknown rule, or otherwise than one that `cp` has
            prepared before.
    """
    # Each method is registered under its own name, so that models with different methods can run side by side.
    name = f"armillary-{type(cp.method).__name__.lower()}-{id(cp.method):x}"
    register_transformers(cp.method, name)
    model.set_attn_implementation(name)
    # transformers only logs a warning for a model without the attention interface, and leaves it unchanged.
    if not any(method is cp.method for method in methods_of(model.config)):
        check_model(type(model), model.config)  # raises with the reason, if it knows one
        raise ValueError(f"{type(model).__name__}: transformers cannot set its attention implementation")
    disable_caches(model)
    check_layers_attend(model)
    cp.count_positions_as(model, padding_idx_of(model))
    # A `ContextParallel` may prepare several models: none of them may get labels that are shifted and should not be.
    cp.shifts_labels = cp.shifts_labels and predicts_next_token(model)


def disable_caches(model: nn.Module) -> None:
    """Makes the parts of a model that attend over shards use no KV cache by default: a shard has no keys of others.

    A call may still ask for one with `use_cache=True`. The config, which is saved with the model, is not changed.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        # Only models have this method, and not their layers.
        if not hasattr(type(module), "get_correct_attn_implementation"):
            continue
        parameters = list(signature(type(module).forward).parameters)
        if "use_cache" in parameters:
            hook_once(module, UncachedCall(parameters.index("use_cache") - 1))  # without self


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
        ImportError: transformers is not installed, or has no ALL_ATTENTION_FUNCTIONS or
            ALL_MASK_ATTENTION_FUNCTIONS.
        ValueError: `attend` is no method.
            When a model selects the implementation: its tokens see each other in other ways (Mamba-1, RWKV, other
            linear attention), or it computes attention itself (Falcon, GPT-J, BLOOM).
            At a call, in the model: modules that mix tokens in other ways (convolutions, MobileBERT's `trigram_input`,
            ESM's `token_dropout`), a pooler of the first token, positions that the model counts itself, an unknown mask
            function, a mask tensor that the model made, a layer whose window or causality differs from its mask's.
            At a call, in its arguments: cross-attention, a filled KV cache, attention dropout, attention weights as
            output and other options that may change attention; several ranks without a layout; an attention_mask that
            hides tokens and was not given to `cp.shard`; position ids that are missing, do not fit the layout or are
            below the model's first position (`padding_idx` + 1), or [B, T] beside images in a model with M-RoPE;
            position ids of several documents for a bidirectional model; labels without shift_labels and
            num_items_in_batch, or for a loss that the model computes itself or that does not predict the next token;
            labels with output_router_logits.
            Raised on every rank, except for arguments that are wrong on one rank only.
    """
    check_method(attend)
    try:
        masks = import_module("transformers.masking_utils")
        models = import_module("transformers.modeling_utils")
        registries: tuple[Any, Any] = models.ALL_ATTENTION_FUNCTIONS, masks.ALL_MASK_ATTENTION_FUNCTIONS
    except (ImportError, AttributeError) as error:
        raise ImportError(f"register_transformers needs transformers >= 5: {error}") from error
    implementation = Implementation(attend)
    registries[0].register(name, implementation.attention)
    registries[1].register(name, implementation.mask)
    wrap_models(models)


class Implementation(ShardedImplementation):
    """The mask function and the attention function that transformers calls, for one method."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.document_reader, self.group_reader = DocumentReader(method), GroupReader(method)
        self.first_positions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """Maps each checked model to the position id that it gives a document's first token."""

    @compat.never_traced  # it communicates and reads stack frames
    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        config: Any = None,
        **_: Any,
    ) -> ShardMask:
        """Returns the mask of one kind of layer. A mask function of `transformers.masking_utils`; lengths are local."""
        if kv_length != q_length or int(q_offset) or kv_offset:
            raise ValueError(
                f"{q_length} queries from {int(q_offset)} on, {kv_length} keys from {kv_offset} on: a sharded sequence "
                "has no KV cache and no cross-attention; call the model on the whole sequence with use_cache=False"
            )
        # 1. The model. transformers passes neither the model nor position ids nor token types to a mask function, so
        # they are read from the stack frames of its callers.
        callers = calling_functions()
        if any(caller.locals.get("encoder_hidden_states") is not None for caller in callers[:1]):
            raise ValueError("the model asks for a mask of cross-attention, which is not supported on shards")
        model = calling_module(callers)
        check_layers(config, accept_states=model is not None and has_sharded_states(type(model)))
        first_position = self._check_model(model)
        # 2. The whole sequence.
        context = current_sequence() or SequenceContext()
        layout = context.layout_for(self.method, q_length)
        position_ids, counts_from_shard = position_ids_of(callers, self.method.shards)
        if attention_mask is not None and not context.padded:
            self._check_padding(attention_mask)
        # 3. The rule. An unknown mask becomes an error only when a layer receives it: perhaps none does.
        rule = groups = refusal = None
        try:
            rule = rule_of(mask_function)
            groups = None if context.mask is not None else self.group_reader.read(rule, callers, layout)
        except ValueError as error:
            refusal = None if context.mask is not None else str(error)
        if rule is not None and rule.bidirectional and context.inferred:
            raise ValueError(
                "position_ids say that a row has several documents, but a bidirectional model does not look for them "
                "there: give documents= to cp.shard, [0, N] for one per row"
            )
        mask = ShardMask(
            context,
            layout,
            self.method.shard,
            rule,
            groups,
            position_ids,
            boundaries_of(callers),
            counts_from_shard,
            first_position,
            refusal,
        )
        # 4. The documents, here and not in the layers, because a compiled layer cannot communicate.
        if refusal is None:
            known_documents(mask, *mask.boundaries)  # may raise on one rank only, so before ranks communicate
            # On any other error the mask stays unfinished, and the first layer that gets it raises the error.
            with suppress(ValueError):
                name = type(config).__name__ if model is None else type(model).__name__
                mask.finished = self._find_mask(name, mask, q_length, position_ids, *mask.boundaries)
        return mask

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """An attention function of transformers: query, key, value [B, heads, T, D] -> ([B, T, heads, D], None)."""
        name = type(module).__name__
        # Without these checks, a layer would silently attend to its shard only, or differently from the model.
        if dropout:
            raise ValueError(f"{name} asks for attention dropout {dropout}: set attention_dropout=0 in the config")
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name} has {query.shape[2]} queries and {key.shape[2]} keys: no KV cache, no cross-attention"
            )
        if not isinstance(attention_mask, ShardMask):
            kind = "none" if attention_mask is None else f"{type(attention_mask).__name__} of its own"
            raise ValueError(
                f"{name} gets a mask that is not from a mask function of transformers, such as create_causal_mask "
                f"({kind}), so its pattern on other ranks is unknown; use another attn_implementation for this module"
            )
        if attention_mask.refusal is not None:
            raise ValueError(attention_mask.refusal)
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        _check_layer(name, attention_mask, sliding_window, causal)
        _check_options(name, options)
        # output_router_logits may be an argument of the call, which the checks of the config do not see.
        if self.method.shards > 1 and options.get("output_router_logits") and options.get("shift_labels") is not None:
            raise ValueError(ROUTER_LOSS_ERROR)
        # The mask function has read these tensors, unless the layer gets others than the model.
        mask = attention_mask.finished_for(query.shape[2], position_ids, cu_seq_lens_q, cu_seq_lens_k)
        if mask is None:
            tensors = position_ids, cu_seq_lens_q, cu_seq_lens_k
            mask = self._find_mask_outside_graphs(name, attention_mask, query.shape[2], *tensors)
        # Llama 4 has already scaled the queries, by positions counted from the shard's first token.
        query = scale_by_position(module, query, attention_mask.positions)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        layout = attention_mask.layout
        return self.method(q, k, v, mask=mask, layout=layout, scale=scaling, softcap=softcap, sinks=s_aux), None

    def _find_mask(
        self,
        name: str,
        mask: ShardMask,
        tokens: int,
        position_ids: Tensor | None,
        cu_seq_lens_q: Tensor | None,
        cu_seq_lens_k: Tensor | None,
    ) -> AttentionMask:
        """Returns the mask of layers that get these tensors; communicates as `DocumentReader.read`."""
        documents = known_documents(mask, cu_seq_lens_q, cu_seq_lens_k)
        return mask.with_documents(self.document_reader.read(name, mask, tokens, position_ids, documents))

    _find_mask_outside_graphs = compat.never_traced(_find_mask)

    def _check_model(self, model: Any) -> int:
        """Checks the modules of a model once; returns the position id of a document's first token."""
        if not isinstance(model, nn.Module):  # the mask function was called outside of a model
            return 0
        if model not in self.first_positions:
            check_modules(model, self.method.shards)
            padding_idx = padding_idx_of(model)
            self.first_positions[model] = 0 if padding_idx is None else padding_idx + 1
        return self.first_positions[model]

    def _check_padding(self, attention_mask: Tensor) -> None:
        """Raises ValueError on every rank if the attention_mask of any rank hides tokens."""
        hides_tokens = not bool(attention_mask.bool().all())
        if any(flag for (flag,) in gather_integers([[int(hides_tokens)]], self.method)):
            raise ValueError(
                "attention_mask hides tokens of a shard: pass it to cp.shard, or pack rows with "
                "sequence(documents=...), where padding is one more document whose labels are -100"
            )


def _check_layer(name: str, mask: ShardMask, sliding_window: int | None, is_causal: bool | None) -> None:
    """Raises ValueError if a layer's window or causality contradicts its mask."""
    rule = mask.rule
    window = None if rule is None else rule.window
    if sliding_window is not None and (window is None or window[0] != sliding_window - 1):
        mask_window = "no window" if window is None else f"sliding_window={(window[0] or 0) + 1}"
        raise ValueError(f"{name} asks for sliding_window={sliding_window}, but its mask has {mask_window}")
    if rule is not None and is_causal is not None and bool(is_causal) != rule.causal:
        layer, pattern = ("causal", "bidirectional") if is_causal else ("bidirectional", "causal")
        raise ValueError(f"{name} is {layer}, but its mask is {pattern}")


HARMLESS = frozenset(
    {"cache_position", "deterministic", "layer_idx", "max_length_k", "max_length_q", "num_items_in_batch"}
    | {"output_hidden_states", "output_router_logits", "position_embeddings", "return_dict", "training", "use_cache"}
    | {"seq_idx", "shift_labels", OPTION}
)
"""Options of layers that do not change attention. Only layers with a state use `seq_idx`."""


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for options that may change attention: biases, selected keys, attention weights as output."""
    unknown = [
        key for key, value in options.items() if key not in HARMLESS and value is not None and value is not False
    ]
    if unknown:
        raise ValueError(f"{name} passes {', '.join(unknown)}, which attention over shards does not support")
