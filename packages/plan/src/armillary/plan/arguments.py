"""Models, clusters and quantities that users name on the planner's command lines, and figures as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import tyro

from armillary.data.console import flag_in_errors, quantity
from armillary.models import GPTConfig, LlamaConfig, StateConfig, pretrained_config
from armillary.plan.cluster import Cluster
from armillary.plan.latent_models import latent_model
from armillary.train.config import flag
from armillary.train.internal import MOST_RANKS

Model = LlamaConfig | GPTConfig
# A number of tokens, such as 65536 or "128Ki"; `amount` converts it to an int.
Quantity = Annotated[int | str, tyro.conf.arg(metavar="INT")]
# A number of bytes, such as "5GiB"; `amount` converts it to an int. `str` is first, or tyro would read "5Gi".
Bytes = Annotated[str | int, tyro.conf.arg(metavar="BYTES")]


def hybrid_8b() -> LlamaConfig:
    """Returns LLaMA-3-8B with Gated DeltaNet, in the sizes of Qwen3-Next, in three of every four layers."""
    states = StateConfig(heads=32, key_heads=16, key_dim=128, value_dim=128)
    mixers = ("delta_rule", "delta_rule", "delta_rule", "attention")
    return replace(LlamaConfig.llama3_8b(), mixers=mixers, states=states)


# Model presets, as functions of the sequence length: a GPT has as many learned positions.
MODELS: dict[str, Callable[[int], Model]] = {
    "debug": lambda _: LlamaConfig.debug(),
    "llama3-8b": lambda _: LlamaConfig.llama3_8b(),
    "llama3-70b": lambda _: LlamaConfig.llama3_70b(),
    "llama2-7b": lambda _: LlamaConfig.llama2_7b(),
    "qwen3-32b": lambda _: LlamaConfig.qwen3_32b(),
    "gpt-3b": GPTConfig.wallfacer_3b,
    "gpt-7b": GPTConfig.wallfacer_7b,
    "hybrid-8b": lambda _: hybrid_8b(),
}


def model_of(name: str, length: int) -> Model:
    """Returns the model of `--model` for `length` tokens: a preset, a Hugging Face folder, or its `config.json`."""
    if name in MODELS:
        return MODELS[name](length)
    if not Path(name).exists():
        raise ValueError(
            f"--model {name}: must be one of {', '.join(MODELS)}, or an existing Hugging Face folder or config.json"
        )
    with flag_in_errors(f"--model {name}"):
        model = latent_model(name) or pretrained_config(name)
    if isinstance(model, LlamaConfig):  # as in the trainer, RoPE has any number of positions
        return replace(model, max_positions=max(model.max_positions, length))
    if length > model.max_positions:
        raise ValueError(
            f"--tokens {length:,}: {name} has {model.max_positions:,} learned positions; give at most as many"
        )
    return model


def pretrained_folder(name: str) -> Path | None:
    """Returns the Hugging Face folder of `--model`; None for a preset."""
    path = Path(name)
    return None if name in MODELS else path.parent if path.is_file() else path


def is_hybrid(model: Model) -> TypeGuard[LlamaConfig]:
    return isinstance(model, LlamaConfig) and model.states is not None


def cluster_of(name: str) -> Cluster:
    """Returns the cluster of `--cluster`: a preset's name, such as "16xh100", or a TOML file (`Cluster.load`)."""
    try:
        cluster = Cluster.load(name) if name.endswith(".toml") else Cluster.named(name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--cluster {name}: {reason}") from error
    if cluster.ranks > MOST_RANKS:
        raise ValueError(f"--cluster {name}: {cluster.ranks:,} ranks; at most {MOST_RANKS:,} are supported")
    return cluster


def amount(options: Any, name: str, parse: Callable[[str | int], int] = quantity) -> int:
    """Returns the number in a field of `options`: a `Quantity`, or with `byte_quantity` a `Bytes`."""
    with flag_in_errors(f"--{flag(name)}"):
        return parse(getattr(options, name))


def model_size(model: Model) -> str:
    count = model.parameters()
    return f"{count / 1e9:.2f}B parameters" if count >= 1e8 else f"{count / 1e6:.2f}M parameters"


def duration(seconds: float) -> str:
    """Formats seconds with at most three digits, such as 2.1 h, 35 s or 120 ms."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
