"""From a configuration to a model: its sizes, the module, and its first weights."""

from __future__ import annotations

from dataclasses import fields, replace

from armillary.models import (
    GPT,
    GPTConfig,
    LinearScaling,
    Llama,
    Llama3Scaling,
    LlamaConfig,
    RopeScaling,
    YarnScaling,
    initialize,
    load_pretrained,
    pretrained_config,
)
from armillary.train.config import ModelConfig
from armillary.train.config.overlay import flag

SIZES = ("family", "dim", "layers", "heads", "kv_heads", "hidden_dim", "head_dim", "qk_norm", "tied_embeddings")
"""Fields that a pretrained folder sets, besides `vocab_size`."""
OF_GPT = ("family", "dim", "layers", "heads", "vocab_size", "pretrained")
"""Fields of a GPT; the others are LLaMA's alone."""
ROPE_THETA = 10_000.0


def model_config(config: ModelConfig, vocab_size: int, length: int) -> LlamaConfig | GPTConfig:
    """The sizes of the model that a configuration asks for.

    Args:
        vocab_size: V, unless there is a pretrained folder: that has its own.
        length: N, tokens of a row; a GPT learns as many positions.

    Raises:
        ValueError: sizes that make no model, or that the family has not; a pretrained folder that cannot be read, or
            of another model.
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
    )


def from_folder(config: ModelConfig, length: int) -> LlamaConfig | GPTConfig:
    """The sizes in the pretrained folder, with the RoPE that was asked for."""
    found = pretrained_config(config.pretrained or "")
    check_sizes(config, found)
    if isinstance(found, GPTConfig):
        check_gpt(config)
        if length > found.max_positions:
            raise ValueError(
                f"--data.sequence-length {length}: {config.pretrained} has learned {found.max_positions} positions, "
                "and a GPT has no others; give at most as many"
            )
        return found
    return replace(
        found,
        rope_theta=found.rope_theta if config.rope_theta is None else config.rope_theta,
        rope_scaling=found.rope_scaling if config.rope_scaling is None else rope_scaling(config),
        max_positions=max(found.max_positions, length),
    )


def check_sizes(config: ModelConfig, found: LlamaConfig | GPTConfig) -> None:
    """Refuses sizes that were asked for and are not those of the folder."""
    plain = ModelConfig()
    family = "gpt" if isinstance(found, GPTConfig) else "llama"
    for name in (*SIZES, "vocab_size"):
        asked, default = getattr(config, name), getattr(plain, name)
        has = family if name == "family" else getattr(found, name, default)
        if asked not in (default, has):
            raise ValueError(
                f"--model.{flag(name)} {asked}: the model in {config.pretrained} has {has}; leave it out, or train "
                "without --model.pretrained"
            )


def check_gpt(config: ModelConfig) -> None:
    """Refuses fields that only a LLaMA has."""
    plain = ModelConfig()
    for field in fields(config):
        asked = getattr(config, field.name)
        if field.name not in OF_GPT and asked != getattr(plain, field.name):
            raise ValueError(
                f"--model.{flag(field.name)} {asked}: a GPT has none; leave it out, or use --model.family llama"
            )


def rope_scaling(config: ModelConfig) -> RopeScaling | None:
    """The change to RoPE's frequencies, with LLaMA 3.1's and YaRN's usual constants."""
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


def fill(model: Llama | GPT, config: ModelConfig, seed: int) -> None:
    """The first weights: those of the pretrained folder, else drawn from `seed`. Communicates nothing.

    Raises:
        ValueError: the folder lacks something, or has something else; on every rank.
    """
    if config.pretrained is None:
        initialize(model, seed)
    else:
        load_pretrained(model, config.pretrained)
