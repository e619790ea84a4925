"""The command that trains what was planned."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.models import GPTConfig
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.presets import Model
from armillary.plan.search.search import Choice, Found
from armillary.train import recipes
from armillary.train.config import Config, DataConfig, ModelConfig, ParallelConfig
from armillary.train.model import OF_GPT, SIZES
from armillary.train.overlay import flag, flat

RECIPES: dict[str, Callable[[], Config]] = {
    "debug": recipes.debug,
    "llama3-8b": recipes.llama3_8b_128k,
    "llama3-70b": recipes.llama3_70b_128k,
    "llama2-7b": recipes.llama3_8b_128k,
    "qwen3-32b": recipes.llama3_70b_128k,
    "gpt-3b": recipes.gpt_wallfacer_3b,
    "gpt-7b": recipes.gpt_wallfacer_7b,
}
"""How a model of each preset is trained."""


def config_of(found: Found, choice: Choice) -> Config:
    """The trainer's configuration for a choice.

    Learning rate, steps and when to save are those of the recipe for such a model, which trains on from published
    weights; its mesh, checkpoints and rows are not."""
    recipe = RECIPES[found.plan.model]()
    return replace(
        recipe,
        model=sizes_of(found.model),
        parallel=ParallelConfig(**choice.candidate.parallel),
        checkpointing=choice.checkpointing,
        data=DataConfig(sequence_length=found.length, rows=found.plan.rows),
        optimizer=replace(recipe.optimizer, on_host=choice.on_host),
        train=replace(recipe.train, accumulation=1),
    )


def sizes_of(model: Model) -> ModelConfig:
    """The flags that make this model, but for RoPE's scaling."""
    gpt = isinstance(model, GPTConfig)
    names = [name for name in (OF_GPT if gpt else SIZES) if name not in ("family", "pretrained")]
    sizes: dict[str, Any] = {name: getattr(model, name) for name in (*names, "vocab_size")}
    if not isinstance(model, GPTConfig):
        sizes["rope_theta"] = model.rope_theta
        sizes["head_dim"] = None if model.head_dim * model.heads == model.dim else model.head_dim
    sizes["family"] = "gpt" if gpt else "llama"
    return ModelConfig(**sizes)


def flags(config: Config) -> list[str]:
    """What to type after `armillary-train` for this configuration, as it differs from the default recipe."""
    before = dict(flat(Config()))
    return [word for name, value in flat(config) if value != before[name] for word in words(name, value)]


def words(name: str, value: Any) -> list[str]:
    """A field as it is typed."""
    if isinstance(value, bool):
        section, _, key = flag(name).rpartition(".")
        return [f"--{section}.{'' if value else 'no-'}{key}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag(name)}", *(str(item) for item in values)]


def command_line(config: Config, cluster: Cluster, data: Path | str = "DATA") -> str:
    """For every node: torchrun, which starts a process for each accelerator and finds the others at HEAD_NODE."""
    nodes = [f"--nnodes {cluster.nodes}", "--rdzv-backend c10d", "--rdzv-endpoint HEAD_NODE:29500"]
    start = ["torchrun", *(nodes if cluster.nodes > 1 else ["--standalone"])]
    start += [f"--nproc-per-node {cluster.ranks_per_node}", "-m armillary.train"]
    return " ".join([*start, shlex.join([*flags(config), "--data.path", str(data)])])
