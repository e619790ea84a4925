"""The model's fields: checks against its family and its pretrained folder, and the scaling of RoPE."""

from __future__ import annotations

from dataclasses import fields

from armillary.models import GPTConfig, LinearScaling, Llama3Scaling, LlamaConfig, RopeScaling, YarnScaling
from armillary.train.config import ModelConfig
from armillary.train.config.overlay import flag

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
"""Fields that a pretrained folder sets, besides `vocab_size`."""
OF_GPT = ("family", "dim", "layers", "heads", "vocab_size", "pretrained")
"""Fields of a GPT; the others are LLaMA's alone."""


def check_sizes(config: ModelConfig, sizes: LlamaConfig | GPTConfig) -> None:
    """Refuses configured sizes that differ from the pretrained folder's.

    Raises:
        ValueError: names the flag and both values.
    """
    plain = ModelConfig()
    family = "gpt" if isinstance(sizes, GPTConfig) else "llama"
    for name in (*SIZES, "vocab_size"):
        value, default = getattr(config, name), getattr(plain, name)
        has = family if name == "family" else getattr(sizes, name, default)
        if value not in (default, has):
            raise ValueError(
                f"--model.{flag(name)} {value}: the model in {config.pretrained} has {has}; leave it out, or train "
                "without --model.pretrained"
            )


def check_gpt(config: ModelConfig) -> None:
    """Refuses fields that only a LLaMA has.

    Raises:
        ValueError: names the flag.
    """
    plain = ModelConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in OF_GPT and value != getattr(plain, field.name):
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
