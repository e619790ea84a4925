"""A check of a Hugging Face architecture: a tiny random copy, with `ContextParallel` on shards and without on one rank.

A right copy does not prove that the architecture is right if it exercises no selection of keys, or no layer with a
state: a selection that keeps all keys of a short sequence, or that no layer of the copy has, is not judged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from inspect import unwrap
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from armillary.attention import ContextParallel, build_attention
from armillary.check.model import ModelReport, check_model
from armillary.check.step import CheckBatch, StepOutput
from armillary.check.tiny import VOCABULARY, check_size, describe, load_config, model_class, tiny_config
from armillary.core.testing import mesh
from armillary.integrations import shards_states

WEIGHT_NOISE = 0.1
"""Standard deviation of the noise added to all weights, so that a mistake in weights initialized to 0 or 1 shows."""
SELECTION = re.compile("Indexer|Compressor|Sparse[A-Za-z]*Attention|LSH")
"""Matches class names of modules that select the keys of a query (DeepSeek, MiniMax), or compress them."""


def check_architecture(
    source: str, method: str | None = None, ring: int = 1, ulysses: int = 1, **options: Any
) -> ModelReport:
    """Checks a tiny random copy of a Hugging Face architecture under `ContextParallel`.

    Args:
        source: folder, config.json or model type.
        method: name of the attention method. By default "ring", "ulysses" or, with both axes, "usp".
        ring, ulysses: ranks on the sequence axis and on the head axis; ring becomes 4 if both are 1.
        options: options of `check_model`.

    Raises:
        ValueError: a model that cannot be found or shrunk; wrong options.
        NotJudged: the results are right, but the copy has or exercises no selection of keys, or no layer with a state,
            that the architecture may have.
        RankFailed: a rank raised, for example because the model cannot be sharded, died or hung.
    """
    if ring == ulysses == 1:
        ring = 4
    # Imports transformers before ranks are started: they are forked, and need not import it again.
    whole_config = load_config(source)
    text_config = whole_config.get_text_config(decoder=True)
    tokens = options.get("tokens", 64)
    config = tiny_config(text_config, tokens)
    check_size(config)
    method = method or default_method(ring, ulysses)
    report = check_model(
        partial(on_shards, config, method, ring, ulysses),
        reference=partial(one_rank, config),
        world_size=ring * ulysses,
        vocabulary=VOCABULARY,
        **options,
    )
    if report.right:
        check_mechanisms(config, tokens, every_mechanism=not Path(source).exists())
    notes = () if text_config is whole_config else (f"of {source}, the text part was checked",)
    title = f"{describe(config)}\n{method} on ring={ring}, ulysses={ulysses}"
    return replace(report, title=title, notes=(*report.notes, *notes))


def document_boundaries(tokens: int) -> tuple[int, ...]:
    """Returns boundaries at about 1/5, 1/2 and 5/6 of the sequence; at 5/6 is a document of one token.

    In 64 tokens on 4 ranks, no boundary is one between shards.
    """
    return tuple(
        sorted({0, tokens // 5 + 1, min(tokens // 2 + 3, tokens), tokens * 5 // 6, tokens * 5 // 6 + 1, tokens})
    )


# The steps.


class InFloat64(TorchFunctionMode):
    # Rounding to float32 would hide errors of shards.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            casts = func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in args[1:]
            if casts or func is torch.Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def new_model(config: Any) -> nn.Module:
    """Returns the model, with the same weights on every rank and without poolers, which need one token of the row."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class(config).from_config(config, **options)
    for module in model.modules():
        if type(getattr(module, "pooler", None)).__name__.endswith("Pooler"):
            module.pooler = None
    model.register_forward_hook(_leave_out_pooled)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=WEIGHT_NOISE)
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    # Each layer too: with checkpointing, backward calls it outside of the model's forward.
    for module in (model, *layers):
        module.forward = _in_float64(module.forward)
    return model


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return forward(*args, **kwargs)

    return forward_in_float64


def _leave_out_pooled(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # A text model of CLIP pools in its own forward, without a module.
    if not isinstance(output, Mapping) or "pooler_output" not in output:
        return output
    outputs: Mapping[str, Any] = output
    return type(output)(**{name: x for name, x in outputs.items() if name != "pooler_output"})


def one_rank(config: Any) -> tuple[nn.Module, Any]:
    """Returns the model and its step on one rank: eager attention, one forward pass per document."""

    def step(model: nn.Module, batch: CheckBatch) -> StepOutput:
        ends = batch.documents or (0, batch.ids.shape[1])
        logits = torch.cat([_logits(model(batch.ids[:, a:b], **_cache_option(model))) for a, b in pairwise(ends)], 1)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.shifted_labels.flatten())
        loss.backward()
        return StepOutput(loss, logits=logits)

    return new_model(config), step


def default_method(ring: int, ulysses: int) -> str:
    """Returns the name of the method that uses these axes."""
    return "ring" if ulysses == 1 else "ulysses" if ring == 1 else "usp"


def on_shards(config: Any, method: str, ring: int, ulysses: int) -> tuple[nn.Module, Any, Any]:
    """Returns the model, its step and the function that averages its gradients, on the ranks of a mesh."""
    device_mesh = mesh(ring=ring, ulysses=ulysses)
    attend = build_attention(method, device_mesh)
    cp = ContextParallel(attend, device_mesh)
    is_causal_lm = model_class(config).__name__ == "AutoModelForCausalLM"

    def step(model: nn.Module, batch: CheckBatch) -> StepOutput:
        # The check's loss is of the next token, whatever the model's own is.
        with cp.shard(batch.ids, shift_labels=batch.shifted_labels, documents=batch.documents) as shard:
            inputs = shard.inputs if is_causal_lm else {"input_ids": shard.ids, "position_ids": shard.position_ids}
            output = model(**inputs, **_cache_option(model))
            loss = cp.loss(output.loss if is_causal_lm else _logits(output), shard)
        loss.backward()
        return StepOutput(loss, shard.layout.positions(attend.shard), _logits(output))

    return cp.prepare(new_model(config)), step, cp.reduce_gradients


def _cache_option(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if getattr(model.config, "use_cache", False) else {}


def _logits(output: Any) -> torch.Tensor:
    """Returns logits [B, T, V]. If the model has no LM head, a random one is applied to its hidden states."""
    if "logits" in output:
        return output.logits
    hidden = output[0]
    generator = torch.Generator().manual_seed(2)
    return hidden @ torch.randn(hidden.shape[-1], VOCABULARY, generator=generator, dtype=torch.float64).to(hidden.dtype)


# Mechanisms that the copy may not exercise.


class NotJudged(ValueError):
    """The result of a copy is right, but a mechanism of the architecture was not exercised."""


class SelectionMode(TorchFunctionMode):
    """Mode that notes the classes of modules that keep fewer entries than there are, by topk."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[type] = []
        self.selecting: set[type] = set()

    def start(self, module: nn.Module, _: Any) -> None:
        self.running.append(type(module))

    def stop(self, *_: Any) -> None:
        self.running.pop()

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
    model = new_model(config)
    # 1. The classes are built.
    built = {type(module) for module in model.modules()}
    classes = vars(sys.modules[type(model).__module__]).values() if every_mechanism else built
    required = {x for x in classes if isinstance(x, type) and issubclass(x, nn.Module) and _is_mechanism(x)}
    if missing := required - built:
        raise NotJudged(
            f"no layer of the default {config.model_type} has {_names(missing)}, so this part of the architecture was "
            "not checked: give a config.json whose layers have it"
        )
    # 2. Modules that select keys keep fewer entries than there are, in a forward pass of the model.
    selections, mode = {layer for layer in required if _selects(layer)}, SelectionMode()
    for module in model.modules():
        if type(module) in selections:
            module.register_forward_pre_hook(mode.start)
            module.register_forward_hook(mode.stop)
    if selections:
        with torch.no_grad(), mode:
            model.eval()(torch.randint(3, VOCABULARY, (1, tokens)), use_cache=False)
    if idle := selections - mode.selecting:
        raise NotJudged(
            f"{_names(idle)} keeps all keys of a sequence of {tokens} tokens, so its selection was not checked: give "
            "more --tokens, or a config.json in which it keeps fewer"
        )


def _names(classes: set[type]) -> str:
    return ", ".join(sorted(x.__name__ for x in classes))


def _is_mechanism(layer: type) -> bool:
    if hasattr(layer, "get_correct_attn_implementation"):  # a model, such as MiniMaxM3SparseForConditionalGeneration
        return False
    selects_itself = "Attention" in layer.__name__ and _selects(layer)  # routers of experts call topk too
    return SELECTION.search(layer.__name__) is not None or selects_itself or shards_states(layer)


def _selects(layer: type) -> bool:
    methods = [unwrap(x) for x in vars(layer).values() if isinstance(x, FunctionType)]  # without torch.no_grad
    return any("topk" in method.__code__.co_names for method in methods)
