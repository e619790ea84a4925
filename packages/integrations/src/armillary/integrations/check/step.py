"""Training steps of a tiny Hugging Face model: with `ContextParallel` on shards, and with transformers on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from armillary.attention import ContextParallel, build_attention
from armillary.attention.check import CheckBatch, StepOutput
from armillary.core.testing import mesh
from armillary.integrations.check.tiny import VOCABULARY, model_class

WEIGHT_NOISE = 0.1
"""Standard deviation of the noise added to all weights, so that a mistake in weights initialized to 0 or 1 shows."""


@dataclass(frozen=True)
class Architecture:
    """A tiny config, and the method and mesh of the ranks."""

    config: Any
    method: str = "ring"
    ring: int = 1
    ulysses: int = 1

    @property
    def is_causal_lm(self) -> bool:
        return model_class(self.config).__name__ == "AutoModelForCausalLM"


class InFloat64(TorchFunctionMode):
    """Mode that ignores a model's casts from float64 to float32, so that rounding does not hide errors of shards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            casts = func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in args[1:]
            if casts or func is torch.Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def new_model(architecture: Architecture) -> nn.Module:
    """Returns the model, with the same weights on every rank and without poolers, which need one token of the row."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class(architecture.config).from_config(architecture.config, **options)
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


def _leave_out_pooled(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: leaves out the output that a text model of CLIP pools in its own forward, without a module."""
    if not isinstance(output, Mapping) or "pooler_output" not in output:
        return output
    outputs: Mapping[str, Any] = output
    return type(output)(**{name: x for name, x in outputs.items() if name != "pooler_output"})


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return forward(*args, **kwargs)

    return forward_in_float64


def one_rank(architecture: Architecture) -> tuple[nn.Module, Any]:
    """Returns the model and its step on one rank: eager attention, one forward pass per document."""
    return new_model(architecture), one_rank_step


def one_rank_step(model: nn.Module, batch: CheckBatch) -> StepOutput:
    """Runs one forward pass per document, and one backward pass from the mean loss over all labels."""
    ends = batch.documents or (0, batch.ids.shape[1])
    logits = torch.cat([_logits(model(batch.ids[:, a:b], **_cache_option(model))) for a, b in pairwise(ends)], 1)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.shifted_labels.flatten())
    loss.backward()
    return StepOutput(loss, logits=logits)


def on_shards(architecture: Architecture) -> tuple[nn.Module, Any, Any]:
    """Returns the model, its step and the function that averages its gradients, on the ranks of a mesh."""
    device_mesh = mesh(ring=architecture.ring, ulysses=architecture.ulysses)
    attend = build_attention(architecture.method, device_mesh)
    cp = ContextParallel(attend, device_mesh)
    model = cp.prepare(new_model(architecture))
    return model, partial(sharded_step, cp, attend.shard, architecture.is_causal_lm), cp.reduce_gradients


def sharded_step(
    cp: ContextParallel, shard_index: int, is_causal_lm: bool, model: nn.Module, batch: CheckBatch
) -> StepOutput:
    """Runs forward and backward on this rank's shard; the loss is that of the whole batch."""
    # The check's loss is of the next token, whatever the model's own is.
    with cp.shard(batch.ids, shift_labels=batch.shifted_labels, documents=batch.documents) as shard:
        inputs = shard.inputs if is_causal_lm else {"input_ids": shard.ids, "position_ids": shard.position_ids}
        output = model(**inputs, **_cache_option(model))
        loss = cp.loss(output.loss if is_causal_lm else _logits(output), shard)
    loss.backward()
    return StepOutput(loss, shard.layout.positions(shard_index), _logits(output))


def _cache_option(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if getattr(model.config, "use_cache", False) else {}


def _logits(output: Any) -> torch.Tensor:
    """Returns logits [B, T, V]. If the model has no LM head, a random one is applied to its hidden states."""
    if "logits" in output:
        return output.logits
    hidden = output[0]
    generator = torch.Generator().manual_seed(2)
    return hidden @ torch.randn(hidden.shape[-1], VOCABULARY, generator=generator, dtype=torch.float64).to(hidden.dtype)
