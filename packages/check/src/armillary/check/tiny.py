"""Tiny copies of Hugging Face configs, for checks of an architecture.

A copy keeps the kinds of layers and the ratio of query to key/value heads; widths, counts and windows are small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from armillary.core.internal import read_json

HEAD_DIM, WIDE_HEAD_DIM = 8, 16
"""Head dims. The wide one is for rotary embeddings of a part of each head, or in sections: these need even dims."""
VOCABULARY = 64
MAX_LAYERS = 8
MAX_PARAMETERS = 50_000_000
"""A larger copy is an error: its config has a size that no rule below shrinks."""

HIDDEN = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "lstm_hidden_size", "d_latents")
HEAD_DIMS = ("head_dim", "d_head", "kv_channels", "d_kv")
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers")
LAYER_LISTS = ("layers", "layer_ids", "layer_indices")
"""Ends of the names of fields that list indices of layers."""
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
STATE_HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
STATE_HEAD_DIMS = ("mamba_d_head", "mamba_headdim", "mamba_head_dim")
FIXED: Mapping[str, int] = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size_mlp", "mlp_hidden_size", "ffn_hidden_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("vocab_size", "n_words"), VOCABULARY),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "blank_token_id"), 1),
    **dict.fromkeys(("pad_token_id", "audio_pad_token_id"), 2),
}
"""New values by the name of the field."""
AT_MOST: Mapping[str, int] = {
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "n_group", "topk_group", "moe_k"),
        2,
    ),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "num_expert_group"), 2),
    **dict.fromkeys(("moe_top_k", "upsample_groups", "num_filters"), 2),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    "linear_num_heads": 4,
    **dict.fromkeys(("first_k_dense_replace", "num_kv_shared_layers", "moe_layer_start_index", "n_shared_experts"), 1),
}
"""Maximum values by the name of the field."""
DROPOUTS = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of fields that are set to 0: shards draw other random numbers than one rank."""
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
"""Rotary parameters that models have by default, though their configs do not."""
GLM_SECTIONS = SECTIONS | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_compress_ratio": 4,
    "indexer_budget": 16,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    **{name: {"rope_parameters": SECTIONS} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "hunyuan_vl_text")},
    **{
        name: {"rope_parameters": GLM_SECTIONS}
        for name in ("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text")
    },
    "dbrx": {"attn_config": {"rope_theta": 5e5, "clip_qkv": 8, "kv_n_heads": 8}, "ffn_config": {"moe_top_k": 2}},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 2, "mask_token_id": 1, "token_dropout": False},
    "xmod": {"default_language": "en_XX"},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}
"""Fields that a model type needs in addition to its defaults, or to have all of its kinds of layers."""


def load_config(source: str) -> Any:
    """Returns the config of a local folder, of a config.json, or of a model type with its defaults; runs no code of it.

    Raises:
        ValueError: no such folder or model type; a config that transformers cannot read; a model type without defaults;
            a model whose code is not part of transformers.
    """
    import transformers

    path = Path(source)
    if not path.exists() and source not in transformers.CONFIG_MAPPING:
        nearest = get_close_matches(source, transformers.CONFIG_MAPPING)
        hint = f"; the nearest model types are {', '.join(nearest)}" if nearest else ""
        raise ValueError(f"{source!r} is neither a folder or config.json on this machine, nor a model type{hint}")
    try:
        if path.exists():
            read_json(path / "config.json" if path.is_dir() else path)  # raises for a FIFO or a device
            return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        return transformers.CONFIG_MAPPING[source](**REQUIRED.get(source, {}))
    except Exception as error:  # configs raise many types; a model made of other models may have no defaults
        raise ValueError(f"{source}: {' '.join(str(error).split())[:200]}") from error


def tiny_config(config: Any, tokens: int) -> Any:
    """Returns a small config of the same class for sequences of `tokens` tokens.

    It has the first layer of each kind, another layer of the first kind, and the last layer if it is not of that kind;
    MAX_LAYERS at most. Windows and chunks are a third of the sequence. Dropout is 0.

    Raises:
        ValueError: the config class cannot be built with the sizes.
    """
    fields: dict[str, Any] = config.to_dict()
    for name in ("quantization_config", "auto_map", "architectures", "transformers_version", "dtype", "torch_dtype"):
        fields.pop(name, None)
    fields.pop("model_type", None)
    parts = {name: part for name in getattr(config, "sub_configs", ()) if (part := getattr(config, name, None))}
    # A part without heads and layers has settings of the model's layers: they are shrunk with the model's own fields.
    settings = {name: x for name, part in parts.items() if _first(x := part.to_dict(), (*HEADS, *LAYERS)) is None}
    sizes = {name: x for part in settings.values() for name, x in part.items() if isinstance(x, (int, float))} | fields
    # 1. Sizes that depend on nothing else.
    vocabularies = [name for name in sizes if "vocab_size" in name or name.endswith("_vocab")]
    changes = {name: min(sizes[name], VOCABULARY) for name in _integers(sizes, vocabularies)}
    changes |= {name: FIXED[name] for name in _integers(sizes, FIXED) if sizes[name] or name.endswith("_id")}
    changes |= {name: min(sizes[name], AT_MOST[name]) for name in _integers(sizes, AT_MOST)}
    changes |= {name: min(sizes[name], 4) for name in _integers(sizes, EXPERTS)}
    changes |= dict.fromkeys(_integers(sizes, WINDOWS), max(tokens // 3, 2))
    dropouts = [name for name in sizes if any(part in name for part in DROPOUTS)]
    changes |= {name: 0.0 for name in dropouts if isinstance(sizes[name], float)}
    # 2. Sizes that depend on each other.
    changes |= _heads(sizes)
    changes |= _state_heads(sizes, changes)
    changes |= _positions(sizes, changes, tokens)
    changes |= _layers(sizes, changes)
    # 3. Parts of the model.
    new_parts = {name: x | {field: changes[field] for field in x if field in changes} for name, x in settings.items()}
    for name in [name for name in parts if name not in settings]:
        with suppress(ValueError):  # a part whose sizes depend on each other keeps them, if it is small enough
            new_parts[name] = tiny_config(parts[name], tokens).to_dict()
    _tie_widths([(sizes, changes), *((parts[name].to_dict(), new) for name, new in new_parts.items())])
    changes = {name: x for name, x in changes.items() if name in fields or name not in sizes}
    try:
        return type(config)(**fields | changes | new_parts)
    except Exception as error:
        raise _build_error(config, error) from error


def _tie_widths(shrunk: Sequence[tuple[Mapping[str, Any], dict[str, Any]]]) -> None:
    """Sets fields for the width of the model or of one of its parts, by another name, to its new width.

    Args:
        shrunk: (old fields, new fields) of the model and of its parts.
    """
    widths = {_first(old, HIDDEN): _first(new, HIDDEN) for old, new in reversed(shrunk)}
    for old, new in shrunk:
        for name in _integers(old, [name for name in old if name.endswith("_dim") or "hidden_size" in name]):
            if old[name] in widths and new.get(name, old[name]) == old[name]:
                new[name] = widths[old[name]]


def _heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of heads, in the config's ratio (8 at most), the head dim and the width of the model."""
    heads = _first(fields, HEADS) or 4
    key_heads = _first(fields, KEY_HEADS) or heads
    group_size = min(max(heads // key_heads, 1), 8)
    # One key/value head in multi-query attention, two in grouped-query attention, else four; doubled until 4
    # divides the number of query heads, so that 4 ranks can share them.
    new_key_heads = 1 if key_heads == 1 and heads > 1 else 2 if group_size > 1 else 4
    while new_key_heads * group_size % 4:
        new_key_heads *= 2
    if "kv_lora_rank" in fields:  # multi-head latent attention: one key/value head per query head
        new_key_heads, group_size = 4, 1
    partly_rotary = "partial_rotary_factor" in str(fields) or "rotary_pct" in fields or "mrope_section" in str(fields)
    head_dim, new_heads = WIDE_HEAD_DIM if partly_rotary else HEAD_DIM, new_key_heads * group_size
    # Configs have several names for each of these sizes. The text part of an encoder-decoder lacks its decoder's.
    sizes = dict.fromkeys((name for name in HIDDEN if name in fields), new_heads * head_dim)
    sizes |= dict.fromkeys((name for name in HEADS if name in fields), new_heads)
    sizes |= {"decoder_attention_heads": new_heads} if "encoder_attention_heads" in fields else {}
    sizes |= dict.fromkeys((name for name in KEY_HEADS if name in fields), new_key_heads)  # None: as many as heads
    sizes |= dict.fromkeys((name for name in HEAD_DIMS if name in fields), head_dim)
    if isinstance(attention_width := fields.get("attention_hidden_size"), int):  # Zamba2's attention is wider
        expand = attention_width // (_first(fields, HIDDEN) or attention_width)
        sizes |= {"attention_hidden_size": expand * new_heads * head_dim, "attention_head_dim": expand * head_dim}
    return sizes


def _state_heads(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the heads of layers with a state: of Mamba-2, as wide as `expand` times the model; of the delta rule."""
    sizes: dict[str, Any] = {}
    key_heads, value_heads = fields.get("linear_num_key_heads"), fields.get("linear_num_value_heads")
    if isinstance(key_heads, int) and isinstance(value_heads, int):
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * max(value_heads // key_heads, 1)}
    expand = _first(fields, ("mamba_expand", "expand"))
    if expand is None:
        return sizes
    width = (_first(changes, HIDDEN) or HEAD_DIM) * expand
    heads, head_dims = STATE_HEADS, STATE_HEAD_DIMS
    if "num_attention_heads" not in fields:  # without attention, these names are those of the heads of the state
        heads, head_dims = (*heads, "num_heads"), (*head_dims, "head_dim")
    sizes |= dict.fromkeys(_integers(fields, heads), width // HEAD_DIM)
    sizes |= dict.fromkeys(_integers(fields, head_dims), HEAD_DIM)
    return sizes | dict.fromkeys(_integers(fields, ("mamba_d_ssm",)), width)


def _positions(fields: Mapping[str, Any], changes: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Returns maximum lengths and rotary parameters. RoPE scaling starts late in the sequence, beyond some shards."""
    old_dim, new_dim = _head_dim(fields), _head_dim({**fields, **changes})
    ropes = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if isinstance(fields.get(name), dict)}
    start = tokens * 7 // 8
    length = start if "'dynamic'" in str(ropes) else 4 * tokens + 2  # dynamic scaling starts at the maximum length
    sizes: dict[str, Any] = dict.fromkeys(
        (name for name in ("max_position_embeddings", "n_positions", "n_ctx") if name in fields), length
    )
    sizes |= dict.fromkeys(_integers(fields, ("original_max_position_embeddings",)), start)
    sizes |= {name: max(fields[name] * new_dim // old_dim, 2) for name in _integers(fields, ("rotary_dim",))}
    return sizes | {name: _shrink_rope(rope, old_dim, new_dim, start) for name, rope in ropes.items()}


def _head_dim(fields: Mapping[str, Any]) -> int:
    width, heads = _first(fields, HIDDEN) or 1, _first(fields, HEADS) or 1
    return _first(fields, ("qk_rope_head_dim", "head_dim")) or max(width // heads, 1)


def _shrink_rope(rope: Mapping[str, Any], old_dim: int, new_dim: int, start: int) -> dict[str, Any]:
    """Returns rotary parameters for heads of another dim, with scaling from position `start` on."""
    shrunk = dict[str, Any]()
    for name, value in rope.items():
        if isinstance(value, dict):  # one dictionary per kind of layer
            shrunk[name] = _shrink_rope(cast(dict[str, Any], value), old_dim, new_dim, start)
        elif name == "original_max_position_embeddings":
            shrunk[name] = start
        elif name in ("long_factor", "short_factor"):
            shrunk[name] = value[: max(round(len(value) * new_dim / old_dim), 1)]
        elif name == "mrope_section":
            # Sections add up to half of the rotated dims; the first one takes what the others leave.
            half = int(new_dim * rope.get("partial_rotary_factor", 1.0) / 2)
            sections = [max(section * half // sum(value), 1) for section in value]
            shrunk[name] = [half - sum(sections[1:]), *sections[1:]]
        else:
            shrunk[name] = value
    return shrunk


def _layers(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    count = _first(fields, LAYERS) or 2
    # A field such as `moe_layers` lists indices of layers; other lists with `count` entries have a value per layer.
    indices = {name for name, x in fields.items() if count > 1 and name.endswith(LAYER_LISTS) and _are_indices(x)}
    per_layer = {
        name: x
        for name, x in fields.items()
        if isinstance(x, (list, tuple)) and len(x) == count > 1 and name not in indices
    }
    overrides = {int(layer): sizes for layer, sizes in (fields.get("per_layer_config") or {}).items()}
    # Layers with the same values in all of these fields are of one kind.
    kinds = [
        str([*(x[i] for x in per_layer.values()), *(i in fields[name] for name in indices), overrides.get(i)])
        for i in range(count)
    ]
    first_of_kind = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    layers = sorted(first_of_kind.values())[: MAX_LAYERS - 2]
    # Another layer of the first kind, after all other kinds.
    layers.append(next((i for i in range(layers[-1] + 1, count) if kinds[i] == kinds[0]), layers[0]))
    if kinds[-1] != kinds[0]:  # Gemma 4 needs full attention there
        layers.append(count - 1)
    else:  # Zamba's hybrid layers share weights, which takes two of them
        layers += [i for i in range(layers[-1], count) if "'hybrid'" in kinds[i] and kinds[i] != kinds[0]][:1]
    sizes: dict[str, Any] = dict.fromkeys((name for name in LAYERS if name in fields), len(layers))
    sizes |= {name: [values[i] for i in layers] for name, values in per_layer.items()}
    sizes |= {name: [i for i, layer in enumerate(layers) if layer in fields[name]] for name in indices}
    if overrides:
        sizes["per_layer_config"] = {
            i: _override(overrides[layer], fields, changes) for i, layer in enumerate(layers) if layer in overrides
        }
    return sizes


def _override(sizes: Mapping[str, Any], fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a layer's own sizes, in their ratio to the model's."""
    new_sizes = {name: _in_ratio(x, fields.get(name), changes.get(name)) for name, x in sizes.items()}
    old, new = {**fields, **sizes}, {**fields, **changes, **new_sizes}
    # A head that consists of a part without positions and a rotary part (Dots 3) stays as wide as both.
    dims = _integers(old, ("qk_nope_head_dim", "qk_rope_head_dim"))
    if old.get("head_dim") == sum(old[name] for name in dims):
        new_sizes["head_dim"] = sum(new[name] for name in dims)
    return new_sizes


def _in_ratio(value: Any, old: Any, new: Any) -> Any:
    """Returns a layer's `value` of a field whose value for the model changes from `old` to `new`, in this ratio."""
    sizes = (value, old, new)
    return max(value * new // old, 1) if all(type(size) is int for size in sizes) else value


def _are_indices(values: Any) -> bool:
    return isinstance(values, list) and len(set(map(str, values))) == len(values) > 0 and type(values[0]) is int


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((fields[name] for name in _integers(fields, names)), None)


def _integers(fields: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [name for name in names if isinstance(fields.get(name), int)]


def describe(config: Any) -> str:
    fields: dict[str, Any] = config.to_dict()
    heads = _first(fields, HEADS)
    kinds = fields.get("layer_types")
    layers = f"{_first(fields, LAYERS)} layers" + (f" ({', '.join(kinds)})" if kinds else "")
    windows = [f"{name}={fields[name]}" for name in _integers(fields, WINDOWS)]
    key_heads = _first(fields, KEY_HEADS) or heads
    return ", ".join(
        [f"tiny {config.model_type}: {layers}", f"{heads} query and {key_heads} key/value heads", *windows]
    )


def model_class(config: Any) -> Any:
    """Returns the class that builds the architecture: a causal LM, a masked LM, or a model without a head.

    For the text part of a larger model, which transformers' Auto classes do not know, a class of its file.

    Raises:
        ValueError: there is none.
    """
    import transformers

    mappings = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MASKED_LM_MAPPING
    for mapping in (*mappings, transformers.MODEL_MAPPING):
        with suppress(KeyError, ValueError):  # ValueError: a class that transformers does not export
            built_by = cast(Any, mapping)[type(config)]
            return built_by[0] if isinstance(built_by, (list, tuple)) else built_by
    file = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    models = [x for x in vars(file).values() if getattr(x, "config_class", None) is type(config)]
    if not models:
        raise ValueError(f"transformers has no model for {type(config).__name__}")
    return min(models, key=lambda x: (not x.__name__.endswith("ForCausalLM"), x.__name__.endswith("PreTrainedModel")))


def predicts_next_token(config: Any) -> bool:
    import transformers

    is_mapped = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return is_mapped or model_class(config).__name__.endswith("ForCausalLM")


def build(config: Any, **options: Any) -> Any:
    """Returns the model of a config, with random weights."""
    return model_class(config)._from_config(config, **options)  # as the Auto classes do


def check_size(config: Any) -> None:
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build(config).parameters())
    except Exception as error:
        raise _build_error(config, error) from error
    if size > MAX_PARAMETERS:
        raise ValueError(f"the tiny copy of {type(config).__name__} has {size:,} parameters: a size was not shrunk")


def _build_error(config: Any, error: Exception) -> ValueError:
    # Its sizes depend on each other in a way that no rule above knows.
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"no tiny copy of {type(config).__name__} can be built: {text[:160]}")
