"""`config.json` <-> our configs."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from armillary.models.config import GPTConfig, LlamaConfig
from armillary.models.hub.families import FAMILIES, Config
from armillary.models.hub.folder import CONFIG, read_json
from armillary.models.hub.rope import describe_rope, read_rope

C = TypeVar("C", LlamaConfig, GPTConfig)

KEPT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "use_cache",
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "task_specific_params",
)
"""What describes a model and changes none of its numbers: it goes with the model unchanged."""


def read_config(folder: str | PathLike[str], kind: type[C]) -> C:
    """The config in `config.json`.

    Raises:
        ValueError: no such file, or one that asks for something else than a model of this kind computes; names it.
    """
    path = Path(folder, CONFIG)
    fields = read_json(path)
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is not None and family.config is not kind:
        known = " or ".join(repr(name) for name, family in FAMILIES.items() if family.config is kind)
        raise ValueError(f"{path}: model_type={fields['model_type']!r}; here it must be {known}")
    return cast(C, parse_file(path, fields))


def read_any_config(folder: str | PathLike[str]) -> Config:
    """The config in `config.json`, of whichever kind of model. Errors as in `read_config`."""
    path = Path(folder, CONFIG)
    return parse_file(path, read_json(path))


def parse_file(path: Path, fields: Mapping[str, Any]) -> Config:
    """`parse`, whose errors name the file."""
    try:
        return parse(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse(fields: Mapping[str, Any]) -> Config:
    """The config that the fields of a `config.json` stand for. Errors as in `read_config`."""
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r}; it must be {' or '.join(map(repr, FAMILIES))}")
    family = FAMILIES[kind]
    given = {name: fields[name] for name in family.fields if fields.get(name) is not None}
    if missing := [name for name in family.required if name not in given]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name, accepted in family.computed.items():
        if fields.get(name) is not None and fields[name] not in accepted:
            wanted = f"must be {' or '.join(map(repr, accepted))}" if accepted else "is not computed here"
            raise ValueError(f"{name}={fields[name]!r} {wanted} for model_type {kind!r}")
    known = {family.fields[name]: value for name, value in {**family.defaults, **given}.items()}
    if family.config is GPTConfig:
        return gpt_config(fields, known)
    # A null is no default: it stands for as many as query heads.
    if "kv_heads" not in known or ("num_key_value_heads" in fields and "num_key_value_heads" not in given):
        known["kv_heads"] = known["heads"]
    return llama_config(kind, fields, known)


def gpt_config(fields: Mapping[str, Any], known: Mapping[str, Any]) -> GPTConfig:
    inner = fields.get("n_inner")
    if inner not in (None, 4 * known["dim"]):
        raise ValueError(f"n_inner={inner} must be null or 4 * n_embd={4 * known['dim']}")
    return GPTConfig(**known)


def llama_config(kind: str, fields: Mapping[str, Any], known: dict[str, Any]) -> LlamaConfig:
    bias = bool(fields.get("attention_bias")) and kind in ("llama", "qwen3")
    theta, scaling = read_rope(fields, known["max_positions"])
    window, first = read_window(kind, fields, known["layers"])
    return LlamaConfig(
        **known,
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=kind == "qwen3",
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        window=window,
        window_from=first,
    )


def read_window(kind: str, fields: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Window, and the first layer that has it.

    Raises:
        ValueError: layers with and without a window in another order.
    """
    window, first = None, 0
    if kind == "mistral":
        window = fields.get("sliding_window", 4096)
    elif kind != "llama" and fields.get("use_sliding_window"):
        window, first = fields.get("sliding_window", 4096), fields.get("max_window_layers", 28)
    # Mistral's layers are all alike, whatever this says.
    types = fields.get("layer_types") if kind != "mistral" else None
    if types is not None:
        first = types.count("full_attention")
        if types != ["full_attention"] * first + ["sliding_attention"] * (layers - first):
            raise ValueError(f"layer_types={types} must be full_attention at first, sliding_attention from some layer")
        if first < layers and window is None:
            raise ValueError(f"layer_types={types} ask for a window; model_type {kind!r} gives none")
    return (None, 0) if window is None or first >= layers else (window, first)


def describe(config: Config, dtype: torch.dtype, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The contents of `config.json`, with what describes the model in the `source`'s.

    Raises:
        ValueError: a combination of options that no family has.
    """
    kind = "gpt2" if isinstance(config, GPTConfig) else llama_family(config)
    family = FAMILIES[kind]
    # Left out, the ids would be read as the family's own.
    kept = {"bos_token_id": None, "eos_token_id": None}
    kept |= {name: value for name, value in (source or {}).items() if name in KEPT}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(config, ours) for theirs, ours in family.fields.items()},
        **(describe_gpt() if isinstance(config, GPTConfig) else describe_llama(kind, config)),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **kept,
    }


def describe_gpt() -> dict[str, Any]:
    """What all our GPTs have in common. They have no dropout."""
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return {"activation_function": "gelu_new", "tie_word_embeddings": True, **dropout}


def describe_llama(kind: str, config: LlamaConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"hidden_act": "silu"} | describe_rope(config.rope_theta, config.rope_scaling)
    if kind in ("llama", "qwen3"):
        fields["attention_bias"] = config.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if kind == "mistral":
        fields["sliding_window"] = config.window
    if kind in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = config.window is not None
        fields["sliding_window"] = config.window
        fields["max_window_layers"] = config.layers if config.window is None else config.window_from
    return fields


def llama_family(config: LlamaConfig) -> str:
    """The `model_type` whose options are those of the config.

    Raises:
        ValueError: no family has this combination.
    """
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    alike = config.qkv_bias == config.out_bias
    if config.qk_norm and alike and not config.mlp_bias:
        return "qwen3"
    if not config.qk_norm and biases == (True, False, False):
        return "qwen2"
    # A "llama" must have a dim that its heads divide; a "mistral" without a window need not.
    divided = config.dim % config.heads == 0
    if not config.qk_norm and config.window is None and alike and divided:
        return "llama"
    if not config.qk_norm and not any(biases) and config.window_from == 0:
        return "mistral"
    names = ("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "window", "window_from", "dim", "heads")
    stated = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise ValueError(
        f"no model_type of Hugging Face's has this combination: {stated}. llama: no window, qkv_bias = out_bias, heads "
        "that divide dim; mistral: a window on all layers, no biases; qwen2: qkv_bias alone; qwen3: qk_norm, "
        "qkv_bias = out_bias, no mlp_bias"
    )
