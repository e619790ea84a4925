"""The sizes of the configured model: from its fields, or from a pretrained folder, which must agree with set fields."""

from __future__ import annotations

from dataclasses import fields, replace

from armillary.models import (
    GPTConfig,
    LinearScaling,
    Llama3Scaling,
    LlamaConfig,
    RopeScaling,
    StateConfig,
    YarnScaling,
    pretrained_config,
)
from armillary.train.config.overlay import flag
from armillary.train.config.sections import ModelConfig

SIZES = (
    "family",
    "dim",
    "layers",
    "heads",
    "kv_heads",
    "hidden_dim",
    "head_dim",
    "qk_norm",
    "tied_embeddings",
    "mixers",
)
"""Fields that a pretrained folder sets, besides `vocab_size`; recipes and files may only repeat their values."""
GPT_FIELDS = ("family", "dim", "layers", "heads", "vocab_size", "pretrained")
"""Fields that a GPT has; only a LLaMA has the others."""
PRETRAINED_FIELDS = ("pretrained", "rope_theta", "rope_scaling", "rope_factor", "rope_original_length")
"""Fields that may be set beside a pretrained folder."""
ROPE_THETA = 10_000.0
"""Base of RoPE's frequencies, unless `rope_theta` is set."""


def model_config(config: ModelConfig, vocab_size: int, length: int) -> LlamaConfig | GPTConfig:
    """Returns the sizes of the configured model.

    Args:
        vocab_size: V; ignored with a pretrained folder, which states its own.
        length: N, tokens of a row; without a pretrained folder, a GPT gets this number of learned positions.

    Raises:
        ValueError: invalid sizes, fields that the family does not have, or a pretrained folder that is unreadable or
            has other sizes than the fields.
    """
    if config.pretrained is not None:
        return from_folder(config, length)
    if config.family == "gpt":
        check_gpt(config)
        return GPTConfig(
            vocab_size=vocab_size, dim=config.dim, layers=config.layers, heads=config.heads, max_positions=length
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        hidden_dim=config.hidden_dim,
        head_dim=config.head_dim or 0,
        qk_norm=config.qk_norm,
        tied_embeddings=config.tied_embeddings,
        rope_theta=ROPE_THETA if config.rope_theta is None else config.rope_theta,
        rope_scaling=rope_scaling(config),
        max_positions=length,
        mixers=config.mixers,
        states=state_config(config),
    )


def state_config(config: ModelConfig) -> StateConfig | None:
    """Returns the sizes of layers with a state; None if all mixers are attention."""
    if set(config.mixers) <= {"attention"}:
        return None
    head_dim = config.head_dim or config.dim // config.heads
    return StateConfig(
        heads=config.state_heads or config.heads,
        key_heads=config.state_key_heads or config.kv_heads,
        key_dim=config.state_key_dim or head_dim,
        value_dim=config.state_value_dim or head_dim,
        conv_width=config.conv_width,
    )


def from_folder(config: ModelConfig, length: int) -> LlamaConfig | GPTConfig:
    """Returns the sizes in the pretrained folder, with RoPE as configured."""
    sizes = pretrained_config(config.pretrained or "")
    check_sizes(config, sizes)
    if isinstance(sizes, GPTConfig):
        check_gpt(config)
        if length > sizes.max_positions:
            raise ValueError(
                f"--data.sequence-length {length}: {config.pretrained} has {sizes.max_positions} learned positions; "
                "give at most as many"
            )
        return sizes
    return replace(
        sizes,
        rope_theta=sizes.rope_theta if config.rope_theta is None else config.rope_theta,
        rope_scaling=sizes.rope_scaling if config.rope_scaling is None else rope_scaling(config),
        max_positions=max(sizes.max_positions, length),
    )


def check_sizes(config: ModelConfig, sizes: LlamaConfig | GPTConfig) -> None:
    """Raises ValueError, with the flag and both values, for sizes that differ from the pretrained folder's."""
    defaults = ModelConfig()
    family = "gpt" if isinstance(sizes, GPTConfig) else "llama"
    for name in (*SIZES, "vocab_size"):
        value, default = getattr(config, name), getattr(defaults, name)
        folder_value = family if name == "family" else getattr(sizes, name, default)
        # A field that has its default counts as not set.
        if value not in (default, folder_value):
            raise ValueError(
                f"--model.{flag(name)} {value}: the model in {config.pretrained} has {folder_value}; leave it out, or "
                "train without --model.pretrained"
            )


def check_gpt(config: ModelConfig) -> None:
    """Raises ValueError, with the flag, for fields that are set and only a LLaMA has."""
    defaults = ModelConfig()  # a field that has its default counts as not set
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in GPT_FIELDS and value != getattr(defaults, field.name):
            raise ValueError(
                f"--model.{flag(field.name)} {value}: a GPT has none; leave it out, or use --model.family llama"
            )


def rope_scaling(config: ModelConfig) -> RopeScaling | None:
    """Returns the scaling of RoPE's frequencies, with LLaMA 3.1's and YaRN's usual constants."""
    match config.rope_scaling:
        case "linear":
            return LinearScaling(factor=config.rope_factor)
        case "llama3":
            return Llama3Scaling(
                factor=config.rope_factor,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=config.rope_original_length,
            )
        case "yarn":
            return YarnScaling(factor=config.rope_factor, original_max_position_embeddings=config.rope_original_length)
        case _:
            return None
