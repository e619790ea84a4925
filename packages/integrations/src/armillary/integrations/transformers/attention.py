"""Hugging Face transformers: an attention implementation that unmodified models select by name.

A model first makes a mask for each kind of layer, then hands it to every layer of the kind. Ours is a `ShardMask`: it
takes along what `sequence` says at that moment, so that a layer recomputed in backward, in any thread, finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from armillary.attention.context_parallel.packing import gather
from armillary.attention.context_parallel.registries import ShardedImplementation
from armillary.attention.context_parallel.sequence import Sharding, check_method, current
from armillary.attention.methods.base import Method
from armillary.integrations.transformers.callers import Caller, callers, model_of
from armillary.integrations.transformers.documents import DocumentFinder, of_cu_seq_lens
from armillary.integrations.transformers.groups import GroupFinder
from armillary.integrations.transformers.llama4 import scaled_by_position
from armillary.integrations.transformers.masks import rule_of
from armillary.integrations.transformers.models import (
    ROUTERS,
    check_layers,
    check_modules,
    padding_idx_of,
    wrap_models,
)
from armillary.integrations.transformers.shard_mask import ShardMask


def register_transformers(attend: Method, name: str = "armillary") -> None:
    """Makes `attend` the attention implementation `name` of Hugging Face transformers.

        register_transformers(attend)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="armillary")
        batch = shard_batch(attend, ids)
        with batch.sequence():
            loss = model(**batch.inputs, use_cache=False).loss  # this rank's share, of `whole_loss(loss, attend)`
        loss.backward()

    The model is unmodified and every rank has all of its parameters (or FSDP's share). The gradients of a rank are its
    tokens' share, to be summed over ranks, where FSDP2 and DDP average: call `armillary.core.sum_gradients(model)`
    after `fully_shard`, or all_reduce each gradient. Each layer keeps its own mask: sliding window, softcap and sinks
    are taken from what the model passes. A model's own loss is this rank's share if it is given shift_labels and
    num_items_in_batch, as `shard_batch` does; others are refused, because they shift labels within a shard.

    Who sees whom is read from the mask functions that the model hands over: windows, chunks, images whose tokens see
    each other, or everything. `sequence(mask=...)` says it instead, where they are not known.

    Packed rows are seen as documents: from `sequence(documents=...)`; else from cu_seq_lens_q, which are of the whole
    sequence; else from position ids that restart at 0. With documents told, position ids may start anywhere and leave
    positions out, as long as they rise within each document. Ranks tell each other a few integers about each
    position_ids tensor, once, so that all know all documents and all refuse what does not fit: make the tensor once,
    not each step. In a bidirectional model, and with M-RoPE's position ids [3, B, T], documents are told, or each row
    is one; so it is in transformers.

    A model is checked when it is given the implementation, built or set: tokens may see each other by attention alone,
    and all attention must go through transformers' attention interface. What neither shows is refused by `sequence`
    when its block ends.

    `sequence` is needed around the model's forward, not around backward, whichever layers are recomputed in it (only if
    the whole model is inside one checkpoint, it is needed there too).

    Registering another method under the same name replaces the first, for models that exist already too.

    Raises:
        ImportError: transformers is not installed, or too old to have the two registries.
        ValueError: where a model is given the implementation that mixes tokens without attention (Mamba, RWKV, linear
            attention, convolution) or attends by itself (Falcon, GPT-J, BLOOM). At a call that cannot be done on a
            shard: cross-attention, masks of a model's own, padding, a filled KV cache, attention dropout, attention
            weights as output, position ids that do not fit the layout, are below those of the model's own rule
            (`padding_idx_of`) or that the model would make itself, a pooler of the first token, labels without
            shift_labels and num_items_in_batch. On every rank alike, but for what only its arguments show.
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


def attend_by(model: Any, attend: Method) -> None:
    """Makes one model of transformers attend by a method, under a registered name of that method's own.

    Raises:
        ValueError: as `register_transformers`.
    """
    name = f"armillary-{type(attend).__name__.lower()}-{id(attend):x}"
    register_transformers(attend, name)
    model.set_attn_implementation(name)
    model.config.use_cache = False  # a shard has no keys of other ranks to cache


class Implementation(ShardedImplementation):
    """The pair of functions that transformers calls, for one method."""

    def __init__(self, attend: Method) -> None:
        super().__init__(attend)
        self.documents, self.groups = DocumentFinder(attend), GroupFinder(attend)
        self.first_positions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """Models that have been checked, and the position id of a document's first token in each."""

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
        """A mask function, as in `transformers.masking_utils`; the lengths are those of this rank."""
        if kv_length != q_length or int(q_offset) or kv_offset:
            raise ValueError(
                f"{q_length} queries from {int(q_offset)} on, {kv_length} keys from {kv_offset} on: a sharded sequence "
                "has no KV cache and no cross-attention; call the model on the whole sequence with use_cache=False"
            )
        check_layers(config)
        around = callers()
        if any(caller.locals.get("encoder_hidden_states") is not None for caller in around[:1]):
            raise ValueError("the model asks for a mask of cross-attention, which is not done on a sharded sequence")
        first_position = self._check_model(model_of(around))
        sharding = current() or Sharding()
        layout = sharding.layout_for(self.attend, q_length)
        position_ids, unplaced = _position_ids(around, self.attend.shards)
        if attention_mask is not None and not sharding.padded:
            self._check_padding(attention_mask)
        rule = groups = refusal = None
        try:
            rule = rule_of(mask_function)
            groups = None if sharding.mask is not None else self.groups.find(rule, around, layout)
        except ValueError as error:
            refusal = None if sharding.mask is not None else str(error)
        return ShardMask(sharding, layout, rule, groups, position_ids, unplaced, first_position, refusal)

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
        **others: Any,
    ) -> tuple[Tensor, None]:
        """An attention function of transformers: query, key, value [B, heads, T, D] -> ([B, T, heads, D], None)."""
        name = type(module).__name__
        if dropout:
            raise ValueError(f"{name} asks for attention dropout {dropout}: set attention_dropout=0 in the config")
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name} has {query.shape[2]} queries and {key.shape[2]} keys: no KV cache, no cross-attention"
            )
        if not isinstance(attention_mask, ShardMask):
            given = "none" if attention_mask is None else f"{type(attention_mask).__name__} of its own"
            raise ValueError(
                f"{name} comes with a mask that is not from create_causal_mask or its sliding window kin ({given}), "
                "so that what it sees on other ranks is unknown; use another attn_implementation for this module"
            )
        if attention_mask.refusal is not None:
            raise ValueError(attention_mask.refusal)
        _check_layer(
            name, attention_mask, sliding_window, getattr(module, "is_causal", None) if is_causal is None else is_causal
        )
        _check_others(name, others)
        if self.attend.shards > 1 and others.get("output_router_logits") and others.get("shift_labels") is not None:
            raise ValueError(ROUTERS)
        layout, told = attention_mask.layout, attention_mask.sharding.documents
        if told is None and cu_seq_lens_q is not None:
            told = of_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, layout)
        documents = self.documents.find(name, attention_mask, query.shape[2], position_ids, told)
        mask = attention_mask.with_documents(documents)
        query = scaled_by_position(module, query, layout.positions(self.attend.shard))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.attend(q, k, v, mask=mask, layout=layout, scale=scaling, softcap=softcap, sinks=s_aux), None

    def _check_model(self, model: Any) -> int:
        """Checks the modules of a model once; returns the position id of a document's first token."""
        if not isinstance(model, nn.Module):  # masks made by a function
            return 0
        if model not in self.first_positions:
            check_modules(model, self.attend.shards)
            padding_idx = padding_idx_of(model)
            self.first_positions[model] = 0 if padding_idx is None else padding_idx + 1
        return self.first_positions[model]

    def _check_padding(self, attention_mask: Tensor) -> None:
        """Refuses on every rank what only one may see."""
        padding = not bool(attention_mask.bool().all())
        if any(flag for (flag,) in gather([[int(padding)]], self.attend)):
            raise ValueError(
                "attention_mask hides tokens: no padding mask on a sharded sequence. Give it to shard_batch, or pack "
                "rows with sequence(documents=...), where padding is one more document whose labels are -100"
            )


def _position_ids(around: list[Caller], shards: int) -> tuple[Tensor | None, bool]:
    """Returns (the model's position ids as far as callers know them, whether the model was given none and needs some).

    Some models give position ids to the maker of masks and not to layers, some to neither. A model without tokens, such
    as a tower of images, is sharded behind the module that adds its positions.

    Raises:
        ValueError: the model takes tokens but no position ids (BART): it counts from the first token of each shard,
            whatever position ids its layers are handed.
    """
    methods = [caller for caller in around if isinstance(caller.locals.get("self"), nn.Module)]
    takes = any("position_ids" in method.parameters for method in methods)
    tokens = [method.locals.get(name) for method in methods for name in ("input_ids", "inputs_embeds")]
    has_tokens = any(isinstance(x, Tensor) for x in tokens)
    if shards > 1 and has_tokens and not takes:
        raise ValueError(
            f"{type(model_of(around)).__name__}.forward takes no position_ids: it counts positions from the first "
            "token of each shard; models whose forward takes position_ids can be sharded"
        )
    known = [ids for caller in around if isinstance(ids := caller.locals.get("position_ids"), Tensor)]
    if known:
        return known[0] if known[0].ndim > 1 else known[0][None], False
    return None, takes or has_tokens


def _check_layer(name: str, mask: ShardMask, sliding_window: int | None, is_causal: bool | None) -> None:
    """Refuses a layer that says one thing to its mask and another to its attention."""
    rule = mask.rule
    window = None if rule is None else rule.window
    if sliding_window is not None and (window is None or window[0] != sliding_window - 1):
        made = "no window" if window is None else f"sliding_window={(window[0] or 0) + 1}"
        raise ValueError(f"{name} asks for sliding_window={sliding_window}, but its mask has {made}")
    if rule is not None and is_causal is not None and bool(is_causal) != rule.causal:
        said, made = ("causal", "bidirectional") if is_causal else ("bidirectional", "causal")
        raise ValueError(f"{name} is {said}, but its mask is {made}")


HARMLESS = frozenset(
    {"cache_position", "deterministic", "layer_idx", "max_length_k", "max_length_q", "num_items_in_batch"}
    | {"output_hidden_states", "output_router_logits", "position_embeddings", "return_dict", "training", "use_cache"}
    | {"seq_idx", "shift_labels"}
)
"""What layers pass on that does not change what attention computes. `seq_idx` is for layers that carry a state."""


def _check_others(name: str, others: dict[str, Any]) -> None:
    """Refuses arguments that may change what attention computes: a bias, a choice of keys, weights to return."""
    unknown = [key for key, value in others.items() if key not in HARMLESS and value is not None and value is not False]
    if unknown:
        raise ValueError(f"{name} passes {', '.join(unknown)}, which attention on a sharded sequence does not do")
