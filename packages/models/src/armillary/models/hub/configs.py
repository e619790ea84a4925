"""Converts Hugging Face's `config.json` to a `LlamaConfig` or `GPTConfig`, and back.

`FAMILIES` has the supported model types: their fields, defaults, and the values that our models compute. `parse` reads
the fields of a file, `describe` writes them; RoPE, whose fields differ between releases of `transformers`, comes last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from armillary.core.internal import check_bool, check_choice, integer, number, read_json
from armillary.models.config import GPTConfig, LatentSizes, LlamaConfig, Mixer, StateConfig
from armillary.models.layers.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

Config = LlamaConfig | GPTConfig

C = TypeVar("C", LlamaConfig, GPTConfig)

CONFIG, GENERATION = "config.json", "generation_config.json"

# Fields of `config.json` that do not affect our computation. A save copies them from the original weights' folder.
COPIED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "embedding_initializer_range",
    "use_cache",
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "task_specific_params",
)

# Names of fields that scale activations or logits (maximal update parametrization, muP). We compute factors of 1.
MUP = re.compile(
    r".*mup.*|scale_(emb|depth)|.*(embedding|residual|attention|logits?|head|key)_(multiplier|scal(e|ing))"
)

# Fields that are the same for each GPT.
GPT_CONSTANTS = {
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

# The class of each `rope_type` of Hugging Face.
SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}

# The default of `rope_theta` in `transformers`.
THETA = 10_000.0

ORIGINAL = "original_max_position_embeddings"


# -- families ----------------------------------------------------------------------------------------------------------

# From names in `config.json` to fields of `LlamaConfig`, for the fields that all families of LLaMA have.
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

# From names in `config.json` to fields of `LatentSizes`.
LATENT_FIELDS = {
    "kv_lora_rank": "rank",
    "q_lora_rank": "query_rank",
    "qk_rope_head_dim": "rotary_dim",
    "qk_nope_head_dim": "key_dim",
    "v_head_dim": "value_dim",
    "rope_interleave": "interleaved",
}

# From names in `config.json` to fields of `GPTConfig`.
GPT_FIELDS = {
    "vocab_size": "vocab_size",
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
}

# Fields without a default in all families of LLaMA.
LLAMA_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

# Defaults of `transformers` that are the same in all families of LLaMA.
LLAMA_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}

# `Family.computed` of all families.
ALWAYS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
# `Family.computed` of all families of LLaMA.
SWIGLU: dict[str, tuple[Any, ...]] = ALWAYS | {"hidden_act": ("silu", "swish")}


class Family(NamedTuple):
    """A `model_type`."""

    architecture: str  # the model's class in `transformers`, with a head
    defaults: Mapping[str, Any]  # of `transformers`, for absent fields
    # For each field that selects a computation, the values that our models compute. The field may also be absent or
    # null. With any other value, the file describes a model that we do not have.
    computed: Mapping[str, tuple[Any, ...]]
    required: tuple[str, ...] = LLAMA_REQUIRED  # fields of `config.json` without a default
    fields: Mapping[str, str] = LLAMA_FIELDS  # from names in `config.json` to fields of our config
    config: type[Config] = LlamaConfig


# Our own `model_type`, for models with other mixers than attention. `transformers` does not have it.
HYBRID = "armillary_hybrid"

# Fields of `LlamaConfig` that a hybrid's file states. In other families the `model_type` determines most of them.
HYBRID_FLAGS = ("qk_norm", "qkv_bias", "out_bias", "mlp_bias")

# Multi-head latent attention without experts. `transformers` derives `head_dim` from the sizes of latents.
LATENT = "youtu"

# The supported families by `model_type`. Defaults are those of the family's config class in `transformers`.
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        LLAMA_DEFAULTS | {"max_position_embeddings": 2048},
        SWIGLU | {"attention_bias": (False, True), "mlp_bias": (False, True), "sliding_window": ()},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        LLAMA_DEFAULTS | {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
        SWIGLU | {"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        LLAMA_DEFAULTS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
        SWIGLU | {"mlp_bias": (False,), "use_sliding_window": (False, True)},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        LLAMA_DEFAULTS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
        SWIGLU | {"attention_bias": (False, True), "mlp_bias": (False,), "use_sliding_window": (False, True)},
    ),
    LATENT: Family(
        "YoutuForCausalLM",
        LLAMA_DEFAULTS
        | {"max_position_embeddings": 131_072, "num_key_value_heads": 16, "tie_word_embeddings": True}
        | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128, "rope_interleave": True},
        SWIGLU | {"attention_bias": (False,)},
        fields={name: field for name, field in LLAMA_FIELDS.items() if field != "head_dim"},
    ),
    HYBRID: Family(
        "ArmillaryHybridForCausalLM",
        LLAMA_DEFAULTS | {"max_position_embeddings": 8192},
        SWIGLU | dict.fromkeys((*HYBRID_FLAGS, "use_sliding_window"), (False, True)),
        required=(*LLAMA_REQUIRED, "mixers", "states"),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
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
        required=(),
        fields=GPT_FIELDS,
        config=GPTConfig,
    ),
}


# -- reading -----------------------------------------------------------------------------------------------------------


def read_config(folder: str | PathLike[str], kind: type[C]) -> C:
    """Reads `config.json` as a config of class `kind`.

    Raises:
        ValueError: the file is missing, or a field has a value that models of this kind do not compute. The error names
            the file and the field.
    """
    path = Path(folder, CONFIG)
    fields = read_json(path)
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is not None and family.config is not kind:
        accepted = " or ".join(repr(name) for name, family in FAMILIES.items() if family.config is kind)
        raise ValueError(f"{path}: model_type={fields['model_type']!r}; here it must be {accepted}")
    return cast(C, parse_file(path, fields))


def read_any_config(folder: str | PathLike[str]) -> Config:
    """Reads `config.json`, in its folder or named itself, of any supported `model_type`. Errors as in `read_config`."""
    path = Path(folder) if Path(folder).name == CONFIG else Path(folder, CONFIG)
    return parse_file(path, read_json(path))


def ends_of_text(folder: Path) -> list[int] | None:
    """Returns the ids of the tokens that end a text: `eos_token_id` of `generation_config.json`, else of `config.json`.

    None if neither file has it.

    Raises:
        ValueError: as `read_json`, or eos_token_id is not an integer or a list of integers.
    """
    for name in (GENERATION, CONFIG):
        path = folder / name
        tokens = read_json(path).get("eos_token_id") if path.is_file() else None
        if tokens is not None:
            values = cast("list[object]", tokens) if isinstance(tokens, list) else [tokens]
            try:
                return [integer("eos_token_id", value) for value in values]
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    return None


def parse_file(path: Path, fields: Mapping[str, Any]) -> Config:
    """Calls `parse`, and adds the file's path to its errors."""
    try:
        return parse(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(fields: Mapping[str, Any]) -> Config:
    """Returns the config from the fields of a `config.json`. Errors as in `read_config`."""
    # 1. Refuse settings that our models do not compute.
    kind = check_choice("model_type", fields.get("model_type"), list(FAMILIES))
    family = FAMILIES[kind]
    nonnull = {name: value for name, value in fields.items() if value is not None}
    if missing := [name for name in family.required if name not in nonnull]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name, accepted in family.computed.items():
        if name in nonnull and nonnull[name] not in accepted:
            expected = f"must be {' or '.join(map(repr, accepted))}" if accepted else "is not computed here"
            raise ValueError(f"{name}={nonnull[name]!r} {expected} for model_type {kind!r}")
    for name, value in nonnull.items():
        if MUP.fullmatch(name) and value is not False and (value is True or value != 1):
            raise ValueError(f"{name}={value!r} is not computed here; it must be 1, false or null")
    # 2. Fields that have a counterpart in our config, with the family's defaults.
    values = {name: nonnull.get(name, family.defaults.get(name)) for name in family.fields}
    sizes = {
        family.fields[name]: read_field(family, name, value) for name, value in values.items() if value is not None
    }
    # For `transformers`, null means as many key/value heads as query heads, and an absent field the family's default.
    is_null = "num_key_value_heads" in fields and "num_key_value_heads" not in nonnull
    if family.config is LlamaConfig and (is_null or "kv_heads" not in sizes):
        sizes["kv_heads"] = sizes["heads"]
    # 3. Options that depend on several fields.
    try:
        if family.config is LlamaConfig:
            return llama_config(kind, fields, sizes)
        if fields.get("n_inner") not in (None, 4 * sizes["dim"]):
            raise ValueError(f"n_inner={fields['n_inner']!r} must be null or 4 * n_embd={4 * sizes['dim']}")
        return GPTConfig(**cast("dict[str, Any]", sizes))
    except ValueError as error:
        # Errors of our configs have our names of sizes, `name=value`. The user knows the names in the file.
        names = {**family.fields, **(LATENT_FIELDS if kind == LATENT else {}), "sliding_window": "window"}
        hf_names = {name: hf_name for hf_name, name in names.items()}
        translated = re.sub(r"(?<![\w.])\w+(?==)", lambda match: hf_names.get(match[0], match[0]), str(error))
        raise ValueError(translated) from error


def read_field(family: Family, name: str, value: object) -> int | float | bool:
    """Returns the value of a field of `config.json`, checked against the type of its counterpart in our config."""
    types = {field.name: field.type for field in dataclass_fields(family.config)}
    match types[family.fields[name]]:
        case "int":
            return size(name, value)
        case "bool":
            return check_bool(name, value)
        case _:
            return number(name, value)


def size(name: str, value: object, minimum: int = 1) -> int:
    """Returns the value if it can be a size of a tensor: an integer below 2^63. Errors as in `read_field`."""
    result = integer(name, value, minimum)
    if result >= 2**63:
        raise ValueError(f"{name}={result} must be below 2^63")
    return result


def llama_config(kind: str, fields: Mapping[str, Any], sizes: dict[str, Any]) -> LlamaConfig:
    """Returns the config of a model of any other family, whose `model_type` is `kind`."""
    # Qwen2 always has biases of q, k and v, and Mistral never has any: `transformers` ignores the field for both.
    bias = bool(fields.get("attention_bias")) and kind in ("llama", "qwen3")
    theta, scaling = read_rope(fields, sizes["max_positions"])
    window, first_layer = read_window(kind, fields, sizes["layers"])
    options: dict[str, Any] = {
        "qk_norm": kind == "qwen3",
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": bool(fields.get("mlp_bias")),
    }
    if kind == HYBRID:
        options = read_hybrid(fields)
    if kind == LATENT:
        options["latent"] = read_latent(fields)
    return LlamaConfig(
        **sizes, **options, rope_theta=theta, rope_scaling=scaling, window=window, window_from=first_layer
    )


def read_hybrid(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `LlamaConfig` that only our own `model_type` has: mixers, sizes of states, and flags."""
    mixers, states = fields["mixers"], fields["states"]
    names = [field.name for field in dataclass_fields(StateConfig)]
    if not isinstance(mixers, list) or not all(isinstance(mixer, str) for mixer in cast("list[object]", mixers)):
        raise ValueError(f"mixers={mixers!r} must be a list of names")
    if not isinstance(states, dict) or {*cast("dict[str, object]", states)} != {*names}:
        raise ValueError(f"states={states!r} must have {', '.join(names)}")
    flags = {name: bool(fields.get(name)) for name in HYBRID_FLAGS}
    sizes = {name: size(f"states.{name}", states[name]) for name in names}
    return {**flags, "mixers": tuple(cast("list[Mixer]", mixers)), "states": StateConfig(**sizes)}


def read_latent(fields: Mapping[str, Any]) -> LatentSizes:
    """Returns the sizes of multi-head latent attention, with the defaults of `transformers` for absent fields."""
    values = {hf_name: fields.get(hf_name, FAMILIES[LATENT].defaults[hf_name]) for hf_name in LATENT_FIELDS}
    interleaved, query_rank = values.pop("rope_interleave"), values.pop("q_lora_rank")
    return LatentSizes(
        interleaved=check_bool("rope_interleave", False if interleaved is None else interleaved),
        query_rank=None if query_rank is None else size("q_lora_rank", query_rank),
        **{LATENT_FIELDS[hf_name]: size(hf_name, value) for hf_name, value in values.items()},
    )


def read_window(kind: str, fields: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Returns the window, or None, and the first layer that has it."""
    window, first_layer = None, 0
    if kind == "mistral" or (kind not in ("llama", LATENT) and fields.get("use_sliding_window")):
        window = fields.get("sliding_window", 4096)
        window = None if window is None else size("sliding_window", window)
    if window is not None and kind != "mistral":
        # Qwen's field counts the first layers, which have no window.
        first_layer = size("max_window_layers", fields.get("max_window_layers", 28), minimum=0)
    # Newer files list the attention of each layer instead. `transformers` ignores this field for Mistral.
    types: object = fields.get("layer_types") if kind != "mistral" else None
    if types is not None:
        layer_types = cast("list[object]", types) if isinstance(types, list) else []
        first_layer = layer_types.count("full_attention")
        expected_types = ["full_attention"] * first_layer + ["sliding_attention"] * (len(layer_types) - first_layer)
        if len(layer_types) != layers or layer_types != expected_types:
            raise ValueError(
                f"layer_types={types} must be full_attention at first, sliding_attention from some layer, for all "
                f"{layers} layers"
            )
        if first_layer < layers and window is None:
            raise ValueError(f"layer_types={types} ask for a window; model_type {kind!r} gives none")
    return (None, 0) if window is None or first_layer >= layers else (window, first_layer)


# -- writing -----------------------------------------------------------------------------------------------------------


def describe(config: Config, dtype: torch.dtype, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the contents of `config.json` for our config, with the fields `COPIED` of `source`.

    Raises ValueError if no family has this combination of options.
    """
    kind = "gpt2" if isinstance(config, GPTConfig) else llama_family(config)
    family = FAMILIES[kind]
    # Unknown ids of special tokens are written as null. For absent ones, `transformers` takes the family's defaults.
    copied_fields = {"bos_token_id": None, "eos_token_id": None}
    copied_fields |= {name: value for name, value in (source or {}).items() if name in COPIED}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{hf_name: getattr(config, name) for hf_name, name in family.fields.items()},
        **(GPT_CONSTANTS if isinstance(config, GPTConfig) else describe_llama(kind, config)),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **copied_fields,
    }


def describe_llama(kind: str, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of a config that depend on the `model_type` `kind`."""
    fields: dict[str, Any] = {"hidden_act": "silu"} | describe_rope(config.rope_theta, config.rope_scaling)
    if kind in ("llama", "qwen3"):
        fields["attention_bias"] = config.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if kind == "mistral":
        fields["sliding_window"] = config.window
    if kind == LATENT:
        fields |= {hf_name: getattr(config.latent, name) for hf_name, name in LATENT_FIELDS.items()}
        fields["attention_bias"] = False
    if kind == HYBRID:
        fields |= {name: getattr(config, name) for name in HYBRID_FLAGS}
        fields |= {"mixers": list(config.mixers), "states": config.states and asdict(config.states)}
    if kind in ("qwen2", "qwen3", HYBRID):
        fields["use_sliding_window"] = config.window is not None
        fields["sliding_window"] = config.window
        fields["max_window_layers"] = config.layers if config.window is None else config.window_from
    return fields


def llama_family(config: LlamaConfig) -> str:
    """Returns a `model_type` that has the config's combination of options. Raises ValueError if none has it."""
    if config.states is not None:
        return HYBRID
    if config.latent is not None:
        return LATENT
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    same_bias = config.qkv_bias == config.out_bias
    if config.qk_norm and same_bias and not config.mlp_bias:
        return "qwen3"
    if not config.qk_norm and biases == (True, False, False):
        return "qwen2"
    # In `transformers`, heads must divide dim for "llama", but need not for "mistral".
    divisible = config.dim % config.heads == 0
    if not config.qk_norm and config.window is None and same_bias and divisible:
        return "llama"
    if not config.qk_norm and not any(biases) and config.window_from == 0:
        return "mistral"
    names = ("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "window", "window_from", "dim", "heads")
    values = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise ValueError(
        f"no model_type of Hugging Face's has this combination: {values}. llama: no window, qkv_bias = out_bias, heads "
        "that divide dim; mistral: a window on all layers or none, no biases; qwen2: qkv_bias alone; qwen3: qk_norm, "
        "qkv_bias = out_bias, no mlp_bias"
    )


# -- RoPE: `rope_theta` and `rope_scaling`, or `rope_parameters` with both (transformers 5) ----------------------------


def read_rope(fields: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Returns RoPE's theta and scaling (None if there is none) from the fields of a `config.json`."""
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope: Any = fields.get(source) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{source}={rope!r} must be an object or null")
    options = cast("dict[str, Any]", rope).copy()
    theta = options.pop("rope_theta", fields.get("rope_theta"))
    theta = number("rope_theta", THETA if theta is None else theta)
    legacy_type = options.pop("type", "default")  # the name in files of older releases
    kind = options.pop("rope_type", legacy_type)
    if not isinstance(kind, str) or kind not in ("default", *SCALINGS):
        raise ValueError(f"{source}={rope}; rope_type must be default, {' or '.join(SCALINGS)}")
    for factor in (options.pop("partial_rotary_factor", None), fields.get("partial_rotary_factor")):
        if factor not in (None, 1):
            raise ValueError(f"partial_rotary_factor={factor!r} must be 1: heads are rotated as a whole")
    names = [] if kind == "default" else [field.name for field in dataclass_fields(SCALINGS[kind])]
    if unknown := sorted(options.keys() - {*names}):
        raise ValueError(f"{source}={rope}; with rope_type {kind!r}, {', '.join(unknown)} is not supported")
    if kind == "default":
        return theta, None
    try:
        rope_scaling = scaling(kind, options, fields, max_positions)
        # Extreme values fail here, instead of in the first forward pass. The head dim does not matter for this check.
        if not (rope_scaling.frequencies(64, theta).isfinite().all() and isfinite(rope_scaling.amplitude)):
            raise ValueError(f"with rope_theta={theta}, its frequencies are not finite")
    except (TypeError, ValueError, ArithmeticError) as error:  # a TypeError names a missing argument
        raise ValueError(f"{source}={rope}: {error}") from error
    return theta, rope_scaling


def scaling(kind: str, options: Mapping[str, Any], fields: Mapping[str, Any], max_positions: int) -> RopeScaling:
    """Returns the scaling of `rope_type` `kind`, with the defaults of `transformers`."""
    for name, value in options.items():
        if value is not None:
            check_bool(name, value) if name == "truncate" else number(name, value)
    # `transformers` treats 0 like null, except in these two fields.
    values = {name: value for name, value in options.items() if value or name in ("truncate", "factor")}
    if kind != "linear":
        # The field beside `rope_scaling` takes precedence over the one inside (Phi 3).
        values[ORIGINAL] = fields.get(ORIGINAL) or values.get(ORIGINAL) or max_positions
        original = number(ORIGINAL, values[ORIGINAL])
        if kind == "yarn" and values.get("factor") is None:
            values["factor"] = max_positions / original
    return SCALINGS[kind](**values)


def describe_rope(theta: float, rope_scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the fields `rope_theta` and `rope_scaling`, which all versions of `transformers` read."""
    if rope_scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    for kind, scaling_type in SCALINGS.items():
        if type(rope_scaling) is scaling_type:
            values = {field.name: getattr(rope_scaling, field.name) for field in dataclass_fields(scaling_type)}
            options = {name: value for name, value in values.items() if value is not None}
            return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **options}}
    accepted = ", ".join(scaling_type.__name__ for scaling_type in SCALINGS.values())
    raise ValueError(f"rope_scaling={rope_scaling} has no name in Hugging Face's config.json; {accepted} have")
