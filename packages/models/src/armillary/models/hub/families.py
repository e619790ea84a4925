"""The supported model types of Hugging Face: their fields, defaults, and the values that our models compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armillary.models.config import GPTConfig, LlamaConfig

Config = LlamaConfig | GPTConfig

LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden_dim",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
}
"""From names in `config.json` to fields of `LlamaConfig`, for the fields that all families of LLaMA have."""

GPT_FIELDS = {
    "vocab_size": "vocab_size",
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
}
"""From names in `config.json` to fields of `GPTConfig`."""

LLAMA_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Fields without a default in all families of LLaMA."""

COMMON_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Defaults of `transformers` that are the same in all families of LLaMA."""

ALWAYS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
"""`Family.computed` of all families."""
SWIGLU: dict[str, tuple[Any, ...]] = ALWAYS | {"hidden_act": ("silu", "swish")}
"""`Family.computed` of all families of LLaMA."""


@dataclass(frozen=True)
class Family:
    """A `model_type`.

    Args:
        architecture: the model's class in `transformers`, with a head.
        config: our class of config.
        fields: from names in `config.json` to fields of our config.
        required: names of fields in `config.json` that have no default.
        defaults: defaults of `transformers` for absent fields.
        computed: for each field that selects a computation, the values that our models compute. The field may also be
            absent or null. With any other value, the file describes a model that we do not have.
    """

    architecture: str
    config: type[Config]
    fields: Mapping[str, str]
    required: tuple[str, ...]
    defaults: Mapping[str, Any]
    computed: Mapping[str, tuple[Any, ...]]


HYBRID = "armillary_hybrid"
"""Our own `model_type`, for models with other mixers than attention. `transformers` does not have it."""

HYBRID_FLAGS = ("qk_norm", "qkv_bias", "out_bias", "mlp_bias")
"""Fields of `LlamaConfig` that a hybrid's file states. In other families the `model_type` determines most of them."""

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        LlamaConfig,
        LLAMA_FIELDS,
        LLAMA_REQUIRED,
        COMMON_DEFAULTS | {"max_position_embeddings": 2048},
        SWIGLU | {"attention_bias": (False, True), "mlp_bias": (False, True), "sliding_window": ()},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        LlamaConfig,
        LLAMA_FIELDS,
        LLAMA_REQUIRED,
        COMMON_DEFAULTS | {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
        SWIGLU | {"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        LlamaConfig,
        LLAMA_FIELDS,
        LLAMA_REQUIRED,
        COMMON_DEFAULTS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
        SWIGLU | {"mlp_bias": (False,), "use_sliding_window": (False, True)},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        LlamaConfig,
        LLAMA_FIELDS,
        LLAMA_REQUIRED,
        COMMON_DEFAULTS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
        SWIGLU | {"attention_bias": (False, True), "mlp_bias": (False,), "use_sliding_window": (False, True)},
    ),
    HYBRID: Family(
        "ArmillaryHybridForCausalLM",
        LlamaConfig,
        LLAMA_FIELDS,
        (*LLAMA_REQUIRED, "mixers", "states"),
        COMMON_DEFAULTS | {"max_position_embeddings": 8192},
        SWIGLU | dict.fromkeys((*HYBRID_FLAGS, "use_sliding_window"), (False, True)),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPTConfig,
        GPT_FIELDS,
        (),
        {
            "vocab_size": 50_257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
        },
        ALWAYS
        | {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "tie_word_embeddings": (True,),
        },
    ),
}
"""The supported families by `model_type`. Defaults are those of the family's config class in `transformers`."""
