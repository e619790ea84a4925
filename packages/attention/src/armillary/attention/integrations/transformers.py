"""Hugging Face transformers: an attention implementation that unmodified models select by name.

A model first makes a mask for each kind of layer, then hands it to every layer of the kind. Ours is a `ShardMask`: it
takes along what `sequence` says at that moment, so that a layer recomputed in backward, in any thread, finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import currentframe
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention.integrations.packing import check_positions, check_shards, find_documents, gather
from armillary.attention.integrations.sequence import Documents, Sharding, check_method, check_tokens, current
from armillary.attention.integrations.transformers_masks import window_of
from armillary.attention.integrations.transformers_models import ROUTERS, check_layers, check_modules, wrap_models
from armillary.attention.mask import AttentionMask, Window
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout


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

    Packed rows are seen as documents: from `sequence(documents=...)`; else from cu_seq_lens_q, which are of the whole
    sequence; else from position ids that restart at 0. With documents told, position ids may start anywhere and leave
    positions out, as long as they rise within each document. Ranks tell each other a few integers about each
    position_ids tensor, once, so that all know all documents and all refuse what does not fit: make the tensor once,
    not each step.

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
            shard: bidirectional, chunked or cross-attention, other masks of a model's own, padding, a filled KV cache,
            attention dropout, attention weights as output, position ids that do not fit the layout, labels without
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


class ShardMask:
    """What stands for the attention mask between a model's mask function and its layers."""

    # Not a dataclass: FSDP2 rebuilds dataclasses among a module's arguments at every call.
    __slots__ = ("layout", "position_ids", "sharding", "window")

    def __init__(
        self, sharding: Sharding, layout: SequenceLayout, window: Window | None, position_ids: Tensor | None
    ) -> None:
        self.sharding, self.layout, self.window, self.position_ids = sharding, layout, window, position_ids

    def __getattr__(self, name: str) -> NoReturn:
        raise NoTensorError(name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise NoTensorError("__getitem__")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        raise NoTensorError(getattr(func, "__name__", str(func)))


class NoTensorError(ValueError, AttributeError):
    """A model computes with what stands for its mask. An AttributeError too, for code that asks what it can do."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model computes with its attention mask ({name}), which on a sharded sequence is no tensor: it "
            "changes the mask, or attends without transformers' attention interface; use another attn_implementation"
        )


class Implementation:
    """The pair of functions that transformers calls, for one method."""

    def __init__(self, attend: Method) -> None:
        self.attend = attend
        self.found: Any = WeakTensorKeyDictionary()
        """By position_ids: (its version, layout, documents), so that layers share one answer."""
        self.checked: WeakSet[nn.Module] = WeakSet()

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
        self._check_model(_local_of_caller("self", 3))
        window = window_of(mask_function)
        sharding = current() or Sharding()
        layout = sharding.layout_for(self.attend, q_length)
        if attention_mask is not None and not sharding.padded:
            self._check_padding(attention_mask)
        # Some models give position ids to the maker of masks and not to layers.
        return ShardMask(sharding, layout, window, _local_of_caller("position_ids", 2))

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
        if is_causal is False or (is_causal is None and getattr(module, "is_causal", None) is False):
            raise ValueError(f"{name} is bidirectional; only causal self-attention is done on a sharded sequence here")
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
        _check_window(name, attention_mask.window, sliding_window)
        _check_others(name, others)
        if self.attend.shards > 1 and others.get("output_router_logits") and others.get("shift_labels") is not None:
            raise ValueError(ROUTERS)
        mask = AttentionMask(
            window=attention_mask.window,
            documents=self._documents(name, attention_mask, query.shape[2], position_ids, cu_seq_lens_q, cu_seq_lens_k),
        )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        layout = attention_mask.layout
        return self.attend(q, k, v, mask=mask, layout=layout, scale=scaling, softcap=softcap, sinks=s_aux), None

    def _documents(
        self,
        name: str,
        mask: ShardMask,
        tokens: int,
        position_ids: Tensor | None,
        cu_seq_lens_q: Tensor | None,
        cu_seq_lens_k: Tensor | None,
    ) -> Documents | None:
        """The documents: those told, else those seen, from what says it for certain to what says it least."""
        documents = mask.sharding.documents
        if documents is None and cu_seq_lens_q is not None:
            documents = self._cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, mask.layout)
        if position_ids is None or position_ids.ndim != 2:
            position_ids = mask.position_ids
        if position_ids is None or position_ids.ndim != 2:
            check_tokens(self.attend.shard, tokens, mask.layout)
            if documents is None:
                raise ValueError(
                    f"{name} is given no position ids [batch, tokens], so that documents cannot be seen; say them with "
                    f"`with sequence(layout=..., documents=...)`: [0, {mask.layout.length}] if there is only one"
                )
            return documents
        known = self.found.get(position_ids)
        version = None if position_ids.is_inference() else position_ids._version
        if known is not None and version is not None and known[:3] == (version, mask.layout, documents):
            return known[3]
        check_shards(tokens, position_ids.shape[1], mask.layout, self.attend)
        if documents is None:
            seen = find_documents(position_ids, mask.layout, self.attend)
        else:
            check_positions(position_ids, mask.layout, self.attend, documents)
            seen = documents
        self.found[position_ids] = (version, mask.layout, documents, seen)
        return seen

    def _cu_seq_lens(self, queries: Tensor, keys: Tensor | None, layout: SequenceLayout) -> Documents | None:
        documents = AttentionMask(documents=queries).documents
        if keys is not None and AttentionMask(documents=keys).documents != documents:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: no cross-attention on a sharded sequence")
        if int(queries[-1]) != layout.length:
            raise ValueError(
                f"cu_seq_lens_q ends at {int(queries[-1])}; it must be that of the whole sequence, of {layout.length}"
            )
        return documents

    def _check_model(self, model: Any) -> None:
        """Looks once through the modules of a model that makes masks, where the one who does is a module."""
        if isinstance(model, nn.Module) and model not in self.checked:
            check_modules(model)
            self.checked.add(model)

    def _check_padding(self, attention_mask: Tensor) -> None:
        """Refuses on every rank what only one may see."""
        padding = not bool(attention_mask.bool().all())
        if any(flag for (flag,) in gather([[int(padding)]], self.attend)):
            raise ValueError(
                "attention_mask hides tokens: no padding mask on a sharded sequence. Give it to shard_batch, or pack "
                "rows with sequence(documents=...), where padding is one more document whose labels are -100"
            )


def _local_of_caller(name: str, levels: int) -> Any:
    """A local of the function that many calls further out; None where it has none of this name."""
    frame = currentframe()
    for _ in range(levels):
        frame = frame and frame.f_back
    return frame.f_locals.get(name) if frame else None


def _check_window(name: str, window: Window | None, sliding_window: int | None) -> None:
    """Refuses a layer that says one window to its mask and another to its attention."""
    told = None if sliding_window is None else (sliding_window - 1, None)
    if told is not None and told != window:
        made = "no window" if window is None else f"sliding_window={(window[0] or 0) + 1}"
        raise ValueError(f"{name} asks for sliding_window={sliding_window}, but its mask has {made}")


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
