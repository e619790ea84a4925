"""Where whole tensors become this rank's in transformers of diffusers, and which of their attention sees all tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn


class Split(NamedTuple):
    """Tokens of `stream` are on `dim`; a tensor without this dim has none, and stays whole."""

    stream: str
    dim: int = -2


IMAGE, TEXT = Split("image"), Split("text")


@dataclass(frozen=True)
class Plan:
    """How one class of models is sharded. Modules are named by patterns, in which `*` is any one part of a name.

    Args:
        attention: modules that attend to all tokens -> the streams that they attend with, as a rank concatenates them.
        processors: which of diffusers' processors are known to attend once, to these tokens alone.
        arguments: module -> its arguments that are whole and become this rank's; "" is the model.
        results: module -> what it returns that is whole and becomes this rank's.
        whole_keys: modules whose keys every rank has, so that each attends by itself.
        text_mask: the model's argument that says which text is padding.
        options: the model's argument with what goes to processors.
    """

    attention: dict[str, tuple[str, ...]]
    processors: tuple[str, ...]
    arguments: dict[str, dict[str, Split]]
    results: dict[str, tuple[Split, ...]] = field(default_factory=dict[str, tuple[Split, ...]])
    whole_keys: tuple[str, ...] = ()
    text_mask: str | None = None
    options: str = "attention_kwargs"
    output: str = "proj_out"

    @staticmethod
    def of(model: nn.Module) -> Plan:
        """The plan of a model's class, or of one of diffusers' that it extends without a forward of its own.

        Raises:
            ValueError: there is none.
        """
        for part in type(model).__mro__:
            known = PLANS.get(part.__name__) if part.__module__.startswith("diffusers.") else None
            if known is not None and type(model).forward is part.forward:
                return known
        raise ValueError(f"{type(model).__name__} cannot be sharded so; of diffusers' transformers, {', '.join(PLANS)}")


PLANS = {
    "FluxTransformer2DModel": Plan(
        attention={
            "transformer_blocks.*.attn": ("text", "image"),
            "single_transformer_blocks.*.attn": ("text", "image"),
        },
        processors=("FluxAttnProcessor",),
        arguments={
            "": {
                "hidden_states": IMAGE,
                "img_ids": IMAGE,
                "encoder_hidden_states": TEXT,
                "txt_ids": TEXT,
                "controlnet_block_samples": IMAGE,
                "controlnet_single_block_samples": IMAGE,
            }
        },
        options="joint_attention_kwargs",
    ),
    "QwenImageTransformer2DModel": Plan(
        attention={"transformer_blocks.*.attn": ("text", "image")},
        processors=("QwenDoubleStreamAttnProcessor2_0",),
        arguments={
            "": {"controlnet_block_samples": IMAGE},
            "transformer_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
            "transformer_blocks.*": {"modulate_index": Split("image", -1)},
        },
        results={"pos_embed": (IMAGE, TEXT)},  # rotary embeddings
        text_mask="encoder_hidden_states_mask",
    ),
    "SD3Transformer2DModel": Plan(
        attention={"transformer_blocks.*.attn": ("image", "text"), "transformer_blocks.*.attn2": ("image",)},
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
        arguments={"": {"block_controlnet_hidden_states": IMAGE}},
        results={"pos_embed": (IMAGE,), "context_embedder": (TEXT,)},
        options="joint_attention_kwargs",
    ),
    "WanTransformer3DModel": Plan(
        attention={"blocks.*.attn1": ("image",)},
        processors=("WanAttnProcessor",),
        arguments={"": {"timestep": Split("image", 1)}, "blocks.0": {"hidden_states": IMAGE}},
        results={"rope": (Split("image", 1), Split("image", 1))},  # cosines and sines
        whole_keys=("blocks.*.attn2",),
    ),
}
"""By the name of diffusers' class."""


def named(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules that a pattern names, with their names."""
    parts = pattern.split(".") if pattern else []
    return [(name, module) for name, module in model.named_modules() if _fits(name, parts)]


def changed_modules(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """The modules that a plan makes changes to, the model itself last."""
    patterns = [pattern for pattern in (*plan.arguments, *plan.results, *plan.attention, plan.output) if pattern]
    return [*(found for pattern in patterns for found in named(model, pattern)), ("", model)]


def _fits(name: str, parts: list[str]) -> bool:
    found = name.split(".") if name else []
    return len(found) == len(parts) and all(part in ("*", own) for part, own in zip(parts, found, strict=True))


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """All modules of a model that attend, as diffusers tells them: those that have a processor."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_processor")}
