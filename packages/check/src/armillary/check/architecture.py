"""A check of a Hugging Face architecture: a tiny random copy, with `ContextParallel` on shards and without on one rank.

The report names the mechanisms that the copy exercises, and those that it does not (`mechanisms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from armillary.attention import ContextParallel, build_attention
from armillary.check.mechanisms import mechanisms_of, missing_layers
from armillary.check.model import ModelReport, check_model
from armillary.check.step import CheckBatch, StepOutput
from armillary.check.tiny import (
    VOCABULARY,
    build,
    check_size,
    describe,
    load_config,
    model_class,
    predicts_next_token,
    tiny_config,
)
from armillary.core.testing import mesh
from armillary.integrations import selects_keys

WEIGHT_NOISE = 0.1
"""Standard deviation of the noise added to all weights, so that a mistake in weights initialized to 0 or 1 shows."""


class Refused(ValueError):
    """Context parallelism does not support the architecture: its layers, or what it takes instead of tokens."""


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
        Refused: the model does not run on token ids alone; layers of a model type select keys, and its default config
            has none.
        RankFailed: a rank raised, for example because the model cannot be sharded, died or hung.
    """
    if ring == ulysses == 1:
        ring = 4
    # Imports transformers before ranks are started: they are forked, and need not import it again.
    whole_config = load_config(source)
    text_config = whole_config.get_text_config(decoder=True)
    inputs = list(signature(model_class(text_config).forward).parameters)
    if "input_ids" not in inputs:
        raise Refused(f"{source} takes no token ids, but {', '.join(inputs[1:4])}, ...")
    tokens = options.get("tokens", 64)
    if (shared := getattr(text_config, "num_kv_shared_layers", None)) and shared == text_config.num_hidden_layers:
        raise Refused(f"{source} takes keys of another model: num_kv_shared_layers={shared} are all of its layers")
    config = tiny_config(text_config, tokens)
    check_size(config)
    model = new_model(config)
    try:
        with torch.no_grad():
            _whole_logits(model, torch.zeros(1, tokens, dtype=torch.long))
    except Exception as error:  # any other error shows on the ranks
        if "None" in str(error):  # an input with the default None, such as pixels, is needed
            takes = ", ".join(inputs[1:4])
            raise Refused(f"{source} takes {takes}, ..., and does not run on token ids alone: {error}") from error
    # Another config of a model type may have more kinds of layers than its defaults.
    other_layers = set[type]() if Path(source).exists() else missing_layers(model)
    if selections := _names(layer for layer in other_layers if selects_keys(layer)):
        raise Refused(f"{source} has layers that select keys ({', '.join(selections)}), which cannot be sharded")
    method = method or default_method(ring, ulysses)
    report = check_model(
        partial(on_shards, config, method, ring, ulysses),
        reference=partial(one_rank, config),
        world_size=ring * ulysses,
        vocabulary=VOCABULARY,
        **options,
    )
    mechanisms = mechanisms_of(config, new_model, _whole_logits, tokens)
    if options.get("documents") is None:
        del mechanisms["documents"]
    mechanisms |= dict.fromkeys(_names(other_layers), False)
    if text_config is not whole_config:
        mechanisms["images or audio"] = False
    title = f"{describe(config)}\n{method} on ring={ring}, ulysses={ulysses}"
    return replace(report, title=title, mechanisms=mechanisms)


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
        if func is torch.full and isinstance(args[1], float):  # the least number of float64 (XGLM)
            kwargs.setdefault("dtype", torch.float64)
        return func(*args, **kwargs)


def new_model(config: Any) -> nn.Module:
    """Returns the model, with the same weights on every rank and without poolers, which need one token of the row."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = build(config, **options)
    for module in model.modules():
        if type(getattr(module, "pooler", None)).__name__.endswith("Pooler"):
            module.pooler = NoPooler()
    model.register_forward_hook(_leave_out_pooled)
    if isinstance(codebooks := getattr(config, "num_codebooks", None), int):
        model.register_forward_pre_hook(_codebook_ids(model, codebooks), with_kwargs=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=WEIGHT_NOISE)
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    # Each layer too: with checkpointing, backward calls it outside of the model's forward.
    for module in (model, *layers):
        module.forward = _in_float64(module.forward)
    return model


class NoPooler(nn.Module):
    def forward(self, hidden: torch.Tensor) -> None:
        return None


def _codebook_ids(model: nn.Module, codebooks: int) -> Callable[..., Any]:
    """Returns a hook that gives each codebook the token ids [B, T], in the first form that the model computes with."""

    def forms(ids: torch.Tensor) -> list[torch.Tensor]:
        by_token = ids[..., None].expand(-1, -1, codebooks + 1)
        # [B, T]; [B, T, C]; [B, T, 1 + C] with a text token; [B C, T].
        return [ids, by_token[..., 1:], by_token, ids.repeat_interleave(codebooks, 0)]

    def runs(ids: torch.Tensor) -> bool:
        with suppress(Exception), torch.no_grad():
            return bool(model(ids))
        return False

    form = next((i for i, ids in enumerate(forms(torch.zeros(1, 3, dtype=torch.long))) if runs(ids)), 0)

    def repeat_ids(model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        ids, *other_args = args or (inputs.pop("input_ids"),)
        return (forms(ids)[form], *other_args), inputs

    return repeat_ids


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return forward(*args, **kwargs)

    return forward_in_float64


def _leave_out_pooled(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # A text model of CLIP pools in its own forward, without a module. DPR's has no other output.
    if not isinstance(output, Mapping) or "pooler_output" not in output or len(output) == 1:
        return output
    outputs: Mapping[str, Any] = output
    return type(output)(**{name: x for name, x in outputs.items() if name != "pooler_output"})


def one_rank(config: Any) -> tuple[nn.Module, Any]:
    """Returns the model and its step on one rank: eager attention, one forward pass per document."""

    def step(model: nn.Module, batch: CheckBatch) -> StepOutput:
        ends = batch.documents or (0, batch.ids.shape[1])
        logits = torch.cat([_whole_logits(model, batch.ids[:, a:b]) for a, b in pairwise(ends)], 1)
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
    is_causal_lm = predicts_next_token(config)

    def step(model: nn.Module, batch: CheckBatch) -> StepOutput:
        # The check's loss is of the next token, whatever the model's own is.
        with cp.shard(batch.ids, shift_labels=batch.shifted_labels, documents=batch.documents) as shard:
            inputs = shard.inputs if is_causal_lm else {"input_ids": shard.ids, "position_ids": shard.position_ids}
            output = model(**inputs, **_cache_option(model))
            # A causal LM that does not shift labels (BART's decoder) gets none.
            loss = cp.loss(output.loss if "labels" in inputs else _logits(output), shard)
        loss.backward()
        return StepOutput(loss, shard.layout.positions(attend.shard), _logits(output))

    return cp.prepare(new_model(config)), step, cp.reduce_gradients


def _whole_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _logits(model(ids, **_cache_option(model)))


def _cache_option(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if getattr(model.config, "use_cache", False) else {}


def _logits(output: Any) -> torch.Tensor:
    """Returns logits [B, T, V]. If the model has no LM head, a random one is applied to its hidden states."""
    if "logits" in output:
        return output.logits
    hidden = output[0]
    generator = torch.Generator().manual_seed(2)
    return hidden @ torch.randn(hidden.shape[-1], VOCABULARY, generator=generator, dtype=torch.float64).to(hidden.dtype)


def _names(classes: Iterable[type]) -> list[str]:
    return sorted(x.__name__ for x in classes)
