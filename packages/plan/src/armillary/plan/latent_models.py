"""Models with multi-head latent attention, MLA (arXiv 2405.04434), that armillary-models does not read.

Their sizes are read from Hugging Face's `config.json`. Training them is up to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.core.internal import check_bool, integer, number, read_json
from armillary.models import LatentSizes, LlamaConfig

# Values of `model_type` that the trainer does not read.
LATENT_TYPES = "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3", "mistral4"


def latent_sizes(fields: Mapping[str, Any]) -> LatentSizes:
    """Returns the sizes of latent attention in the fields of a `config.json`.

    Raises:
        ValueError: a size is missing, or is not an integer of at least 1.
    """
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    rank, rotary_dim, key_dim, value_dim = sizes_of(fields, *names)
    query_rank = fields.get("q_lora_rank")
    return LatentSizes(
        rank=rank,
        rotary_dim=rotary_dim,
        key_dim=key_dim,
        value_dim=value_dim,
        query_rank=None if query_rank is None else integer("q_lora_rank", query_rank, 1),
    )


def latent_model(name: str) -> LlamaConfig | None:
    """Returns the model of a Hugging Face folder or its `config.json`; None for a `model_type` not of `LATENT_TYPES`.

    Raises:
        ValueError: a size is missing or wrong, a layer has experts or a state, or attention has biases.
    """
    if trainer_reads(name):
        return None
    fields = read_fields(name)
    check_layers(fields)
    names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    vocab_size, dim, layers, heads, hidden_dim = sizes_of(fields, *names)
    has_bias = check_bool("attention_bias", fields.get("attention_bias") or False)
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        hidden_dim=hidden_dim,
        latent=latent_sizes(fields),
        norm_eps=number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
        tied_embeddings=check_bool(
            "tie_word_embeddings", fields.get("tie_word_embeddings", fields["model_type"] == "minicpm3")
        ),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=check_bool("mlp_bias", fields.get("mlp_bias") or False),
    )


def trainer_reads(name: str) -> bool:
    """Returns False if a model is a folder, or `config.json`, of `LATENT_TYPES`."""
    return not Path(name).exists() or read_fields(name).get("model_type") not in LATENT_TYPES


def read_fields(name: str) -> Mapping[str, Any]:
    path = Path(name)
    return read_json(path if path.is_file() else path / "config.json")


def sizes_of(fields: Mapping[str, Any], *names: str) -> list[int]:
    """Returns integers of at least 1. Raises ValueError for missing and other values."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return [integer(name, fields[name], 1) for name in names]


def check_layers(fields: Mapping[str, Any]) -> None:
    """Raises ValueError if a layer has experts instead of one MLP, or a state instead of attention."""
    mixers = fields.get("layer_types") or ["linear_attention" if fields["model_type"] == "kimi_linear" else ""]
    if "linear_attention" in mixers:
        raise ValueError("layer_types has linear_attention: only full_attention is planned beside latents")
    # Files list the layers with experts, or count the first layers without.
    types, layers = fields.get("mlp_layer_types"), integer("num_hidden_layers", fields.get("num_hidden_layers", 1))
    dense_layers = integer("first_k_dense_replace", fields.get("first_k_dense_replace", 0))
    has_experts = dense_layers < layers if types is None else "sparse" in types
    for name in ("n_routed_experts", "num_experts"):
        if fields.get(name) and has_experts:
            raise ValueError(f"{name}={fields[name]}: layers with experts are not planned, only one MLP in each layer")
