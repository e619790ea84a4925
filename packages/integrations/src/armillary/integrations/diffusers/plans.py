"""Plans of diffusers' transformers: the tensors to shard, and the modules that attend to all tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn


class Split(NamedTuple):
    """The dim of a tensor that has the tokens of a stream, "image" or "text". A tensor without this dim stays whole."""

    stream: str
    dim: int = -2


IMAGE, TEXT = Split("image"), Split("text")


@dataclass(frozen=True)
class Plan:
    """The sharding of one class of models. Modules are named by patterns, in which `*` matches one part of a name.

    Args:
        attention: modules that attend to all tokens -> their streams, in the order in which a rank concatenates them.
        processors: class names of diffusers' attention processors that call attention once, on these tokens only.
        arguments: module -> its arguments that get whole tensors, which are sharded before its forward; "" is the
            model.
        results: module -> the splits of its results, whole tensors that are sharded after its forward.
        whole_keys: cross-attention modules: every rank has all of their keys and attends without communication.
        text_mask: name of the model's argument that marks padding of the text.
        options: name of the model's argument with options for processors.
        output: the module whose output is gathered from all ranks.
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
        """Returns the plan of a model's class, or of the diffusers class whose forward it inherits.

        Raises:
            ValueError: the class has no plan.
        """
        for base in type(model).__mro__:
            # A subclass that overrides forward may use tokens in ways that the plan does not know.
            plan = PLANS.get(base.__name__) if base.__module__.startswith("diffusers.") else None
            if plan is not None and type(model).forward is base.forward:
                return plan
        raise ValueError(
            f"{type(model).__name__} cannot be sharded; of diffusers' transformers, {', '.join(PLANS)} can"
        )


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
"""Plans by the name of diffusers' class."""


def find_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules that a pattern names, with their names. The empty pattern names the model."""
    parts = pattern.split(".") if pattern else []
    return [(name, module) for name, module in model.named_modules() if _matches(name, parts)]


def _matches(name: str, pattern: list[str]) -> bool:
    parts = name.split(".") if name else []
    return len(parts) == len(pattern) and all(p in ("*", part) for p, part in zip(pattern, parts, strict=True))


def changed_modules(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """Returns the modules that a plan changes, the model itself last."""
    patterns = [pattern for pattern in (*plan.arguments, *plan.results, *plan.attention, plan.output) if pattern]
    return [*(module for pattern in patterns for module in find_modules(model, pattern)), ("", model)]


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """Returns the modules of a model that attend: in diffusers, those with a processor."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_processor")}
