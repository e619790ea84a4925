"""A call of a model of transformers on a shard, inside of `with sequence(...)`: what its layers get instead.

A model first creates a mask for each kind of layer, then passes it to every layer of that kind. Our mask function
returns a `ShardMask` with the layout given to `with sequence(...)` and the documents; layers with a state get both as
an option (`StateHook`). So a layer that backward recomputes, in any thread, has those of its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from armillary.attention import AttentionMask, Method
from armillary.attention.internal import (
    SequenceContext,
    ShardedImplementation,
    TensorCache,
    current_sequence,
    gather_integers,
    sequence_axis,
)
from armillary.core import SequenceLayout
from armillary.core.internal import compat
from armillary.integrations.transformers.documents import (
    RowReader,
    boundaries_of,
    calling_functions,
    calling_module,
    known_documents,
    position_ids_of,
)
from armillary.integrations.transformers.latents import expansion_of
from armillary.integrations.transformers.mask_functions import ShardMask, rule_of
from armillary.integrations.transformers.models import check_layers, check_modules, method_of, padding_idx_of
from armillary.integrations.transformers.outputs import ROUTER_LOSS_ERROR
from armillary.integrations.transformers.positions import scale_by_position
from armillary.integrations.transformers.recurrent_layers import OPTION, StateSequence, has_sharded_states

# Options of layers that do not change attention. Only layers with a state use `seq_idx`.
HARMLESS = frozenset(
    {"cache_position", "deterministic", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q"}
    | {"num_items_in_batch"}
    | {"output_hidden_states", "output_router_logits", "position_embeddings", "return_dict", "training", "use_cache"}
    | {"seq_idx", "shift_labels", OPTION}
)


class Implementation(ShardedImplementation):
    """The mask function and the attention function that transformers calls, for one method."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.rows = RowReader(method)
        self.first_positions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """Maps each checked model to the position id that it gives a document's first token."""

    @compat.never_traced  # it communicates and reads stack frames; layers can still be compiled
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
        # 1. The model, from the stack frames of the callers. Its modules are checked once.
        callers = calling_functions()
        if any(caller.locals.get("encoder_hidden_states") is not None for caller in callers[:1]):
            raise ValueError("the model asks for a mask of cross-attention, which is not supported on shards")
        model = calling_module(callers)
        check_layers(config, accept_states=model is not None and has_sharded_states(type(model)))
        if model is not None and model not in self.first_positions:
            check_modules(model, self.method.shards)
            padding_idx = padding_idx_of(model)
            self.first_positions[model] = 0 if padding_idx is None else padding_idx + 1
        # 2. The whole sequence.
        context = current_sequence() or SequenceContext()
        layout = context.layout_for(self.method, q_length)
        position_ids, counts_from_shard = position_ids_of(callers, self.method.shards)
        if attention_mask is not None and not context.padded:
            hides_tokens = not bool(attention_mask.bool().all())
            if any(flag for (flag,) in gather_integers([[int(hides_tokens)]], self.method)):
                raise ValueError(
                    "attention_mask hides tokens of a shard: pass it to cp.shard, or pack rows with "
                    "sequence(documents=...), where padding is one more document whose labels are -100"
                )
        # 3. The rule. An unknown mask becomes an error only when a layer receives it: perhaps none does.
        rule = groups = refusal = None
        try:
            rule = rule_of(mask_function)
            groups = None if context.mask is not None else self.rows.groups(rule, callers, layout)
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
            0 if model is None else self.first_positions[model],  # None: called outside of a model
            refusal,
            batch_size,
            self.attention,
        )
        # 4. The documents, here and not in the layers, because a compiled layer cannot communicate.
        if refusal is None:
            documents = known_documents(mask, *mask.boundaries)  # may raise on one rank only, before ranks communicate
            # On any other error the mask stays unfinished, and the first layer that gets it raises the error.
            with suppress(ValueError):
                name = type(config).__name__ if model is None else type(model).__name__
                documents = self.rows.documents(name, mask, q_length, position_ids, documents)
                mask.finished = mask.with_documents(documents)
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
        # Trainers with context parallelism of their own leave the mask out by a hook; that of the batch replaces it.
        if attention_mask is None and is_causal:
            attention_mask = self._mask_of_batch(query)
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
        # Biases, selected keys, attention weights as output.
        unknown = [x for x, value in options.items() if x not in HARMLESS and value is not None and value is not False]
        if unknown:
            raise ValueError(f"{name} passes {', '.join(unknown)}, which attention over shards does not support")
        # output_router_logits may be an argument of the call, which the checks of the config do not see.
        if self.method.shards > 1 and options.get("output_router_logits") and options.get("shift_labels") is not None:
            raise ValueError(ROUTER_LOSS_ERROR)
        # The mask function has read these tensors, unless the layer gets others than the model.
        mask = attention_mask.finished_for(query.shape[2], position_ids, cu_seq_lens_q, cu_seq_lens_k)
        if mask is None:
            boundaries = cu_seq_lens_q, cu_seq_lens_k
            mask = self._read_mask(name, attention_mask, query.shape[2], position_ids, boundaries)
        # Llama 4 has already scaled the queries, by positions counted from the shard's first token.
        query = scale_by_position(module, query, attention_mask.positions)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        expansion, layout = expansion_of(module), attention_mask.layout
        scores: Any = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
        return self.method(q, k, v, mask=mask, layout=layout, expansion=expansion, **scores), None

    def _mask_of_batch(self, query: Tensor) -> ShardMask | None:
        """Returns the mask given to `sequence` or `cp.shard`; None without one."""
        context = current_sequence()
        if context is None or context.mask is None:
            return None
        layout = context.layout_for(self.method, query.shape[2])
        shard, nothing = self.method.shard, (None, None)
        return ShardMask(context, layout, shard, None, None, None, nothing, False, 0, None, len(query), self.attention)

    @compat.never_traced  # it communicates
    def _read_mask(
        self,
        name: str,
        mask: ShardMask,
        tokens: int,
        position_ids: Tensor | None,
        boundaries: tuple[Tensor | None, Tensor | None],
    ) -> AttentionMask:
        documents = known_documents(mask, *boundaries)
        return mask.with_documents(self.rows.documents(name, mask, tokens, position_ids, documents))


def _check_layer(name: str, mask: ShardMask, sliding_window: int | None, is_causal: bool | None) -> None:
    rule = mask.rule
    window = None if rule is None else rule.window
    if sliding_window is not None and (window is None or window[0] != sliding_window - 1):
        mask_window = "no window" if window is None else f"sliding_window={(window[0] or 0) + 1}"
        raise ValueError(f"{name} asks for sliding_window={sliding_window}, but its mask has {mask_window}")
    if rule is not None and is_causal is not None and bool(is_causal) != rule.causal:
        layer, pattern = ("causal", "bidirectional") if is_causal else ("bidirectional", "causal")
        raise ValueError(f"{name} is {layer}, but its mask is {pattern}")


class StateHook:
    """Pre-forward hook of a model: adds the option `OPTION`, a `StateSequence`, for its layers with a state.

    A submodel has this hook too, because the outer model may not pass options on (Mamba2ForCausalLM).
    """

    def __init__(self) -> None:
        self.checked_models: WeakSet[nn.Module] = WeakSet()
        self.checked_positions = TensorCache()

    @compat.never_traced  # it communicates
    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The outer model may have passed the option of its own hook already. On one rank, outside of `sequence`, the
        # original functions run.
        method = method_of(model.config)
        if method is None or OPTION in kwargs or (current_sequence() is None and method.shards == 1):
            return None
        if model not in self.checked_models:
            check_modules(model, method.shards)
            self.checked_models.add(model)
        tokens = next(x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        context = current_sequence() or SequenceContext()
        layout = context.layout_for(method, tokens.shape[1])
        mask = context.mask
        if mask is None and context.documents is not None:
            mask = AttentionMask(documents=context.documents)
        if mask is None and kwargs.get("position_ids") is not None:
            ids = kwargs["position_ids"]
            self.checked_positions.get(ids, layout, lambda: _check_positions(method, layout, ids))
        if not _takes_options(type(model)):  # the hooks of its submodels add the option
            return None
        return args, {**kwargs, OPTION: StateSequence(layout, sequence_axis(method), mask)}


@cache
def _takes_options(model: type) -> bool:
    return any(x.kind is Parameter.VAR_KEYWORD for x in signature(model.forward).parameters.values())


def _check_positions(method: Method, layout: SequenceLayout, position_ids: Tensor) -> None:
    # Only attention finds documents in position ids, so they must be those of one document that starts at 0.
    expected = layout.positions(method.shard).to(position_ids.device)
    differs = not bool((position_ids.reshape(-1, len(expected)) == expected).all())
    if any(flag for (flag,) in gather_integers([[int(differs)]], method)):
        raise ValueError(
            "position_ids are not those of one document from position 0 on, and layers with a state do not take "
            "documents from them: give documents= to cp.shard or to `sequence`"
        )
