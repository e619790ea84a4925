"""Weights as folders that Hugging Face's `transformers` reads and writes: `config.json` and safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.models.config import LlamaConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden_dim",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
}
"""Hugging Face's name of each field of `LlamaConfig`."""

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""What `transformers` assumes where a config says nothing."""

ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What is computed here. Another value means another model; `model_type` must be stated, the rest may be left out."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def write(folder: str | PathLike[str], config: LlamaConfig, tensors: Mapping[str, Tensor]) -> None:
    """Writes `config` and `tensors`, by Hugging Face's names. Errors as in `Llama.save_pretrained`."""
    if config.qk_norm or config.qkv_bias:
        raise ValueError(f"qk_norm={config.qk_norm} and qkv_bias={config.qkv_bias}: a LLaMA's folder says neither")
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or tensor.is_meta:
            state = "is sharded; gather it first" if isinstance(tensor, DTensor) else "has no data"
            raise ValueError(f"cannot save {name}: it {state}")
    dtype = next(iter(tensors.values())).dtype
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    fields = json.dumps(describe(config, dtype), indent=2) + "\n"
    Path(folder).mkdir(parents=True, exist_ok=True)
    replace(Path(folder, WEIGHTS), lambda path: save_file(whole, path, metadata={"format": "pt"}))
    replace(Path(folder, CONFIG), lambda path: path.write_text(fields))


def replace(path: Path, save: Callable[[Path], object]) -> None:
    """Puts what `save` writes at `path`, all of it or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        save(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def describe(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **ONLY,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "rope_scaling": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # Left out, they would be read as LLaMA-2's 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_config(folder: str | PathLike[str]) -> LlamaConfig:
    """The config in `config.json`. Errors as in `Llama.from_pretrained`."""
    path = Path(folder, CONFIG)
    fields = read_json(path)
    check_supported(fields, path)
    rope: dict[str, Any] = fields.get("rope_parameters") or {}
    given = {name: value for name, value in {**fields, **rope}.items() if name in FIELDS and value is not None}
    if missing := [name for name in REQUIRED if name not in given]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    known: dict[str, Any] = {**DEFAULTS, "num_key_value_heads": given["num_attention_heads"], **given}
    try:
        return LlamaConfig(**{FIELDS[name]: value for name, value in known.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def check_supported(fields: Mapping[str, Any], path: Path) -> None:
    """Refuses a config that describes another computation than `Llama`'s."""
    stated = {**ONLY, "model_type": None, **fields}
    for name, value in ONLY.items():
        if stated[name] != value:
            raise ValueError(f"{path} has {name}={stated[name]!r}; only {value!r} is supported")
    for name in ("rope_scaling", "rope_parameters"):
        rope: dict[str, Any] = fields.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.keys() - {"rope_type", "type", "rope_theta"}:
            raise ValueError(f"{path} has {name}={rope}; only unscaled RoPE (rope_type 'default') is supported")


def read_tensors(folder: str | PathLike[str], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The tensors of these names and shapes. Errors as in `Llama.from_pretrained`."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(Path(folder)):
        tensors |= read_file(path)
    # Frequencies of RoPE, which old checkpoints carry and which follow from the config.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if faults := list(differences(tensors, shapes)):
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {'; '.join(faults[:8])}{more}")
    return tensors


def differences(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> Iterable[str]:
    """What is wrong with the names, shapes and dtypes of `tensors`."""
    yield from (f"{name} is missing" for name in shapes if name not in tensors)
    for name, tensor in tensors.items():
        if name not in shapes:
            yield f"{name} is not part of the model"
        elif tensor.shape != shapes[name]:
            yield f"{name} is {tuple(tensor.shape)}, not {tuple(shapes[name])}"
        elif tensor.dtype not in DTYPES:
            yield f"{name} is {tensor.dtype}, not one of {', '.join(map(str, DTYPES))}"


def weight_files(folder: Path) -> list[Path]:
    """The one file, or those that the index names. With both, the one file, as `transformers` has it."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{folder / INDEX} lacks weight_map")
    return [folder / name for name in sorted(set(cast(dict[str, str], names).values()))]


def read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object")
    return cast(dict[str, Any], fields)
