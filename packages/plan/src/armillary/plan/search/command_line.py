"""The command that trains what was planned."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.models import GPTConfig
from armillary.plan.presets import Model
from armillary.plan.search.search import Choice, SearchResult
from armillary.plan.train_config import flags, recipe_of, write
from armillary.train.config import Config, DataConfig, ModelConfig, ParallelConfig
from armillary.train.model import OF_GPT, SIZES

RECIPES = {
    "debug": "debug",
    "llama3-8b": "llama3_8b_128k",
    "llama3-70b": "llama3_70b_128k",
    "llama2-7b": "llama3_8b_128k",
    "qwen3-32b": "llama3_70b_128k",
    "gpt-3b": "gpt_wallfacer_3b",
    "gpt-7b": "gpt_wallfacer_7b",
}
"""How a model of each preset is trained."""


def config_of(found: SearchResult, choice: Choice) -> Config:
    """The trainer's configuration for a choice.

    Learning rate, steps and when to save are those of the recipe for such a model, which trains on from published
    weights; its mesh, checkpoints and rows are not."""
    recipe = recipe_of(RECIPES[found.plan.model])
    return replace(
        recipe,
        model=sizes_of(found.model),
        parallel=ParallelConfig(**choice.candidate.parallel, kernel=found.plan.kernel),
        checkpointing=choice.checkpointing,
        data=DataConfig(sequence_length=found.length, global_batch_size=found.plan.rows),
        optimizer=replace(recipe.optimizer, cpu_offload=choice.on_host),
        train=replace(recipe.train, accumulation=1),
    )


def sizes_of(model: Model) -> ModelConfig:
    """The flags that make this model, but for RoPE's scaling."""
    gpt = isinstance(model, GPTConfig)
    names = [name for name in (OF_GPT if gpt else SIZES) if name not in ("family", "pretrained")]
    sizes: dict[str, Any] = {name: getattr(model, name) for name in (*names, "vocab_size")}
    if not isinstance(model, GPTConfig):
        sizes |= {"rope_theta": model.rope_theta, "rope_scaling": "none"}
        sizes["head_dim"] = None if model.head_dim * model.heads == model.dim else model.head_dim
    sizes["family"] = "gpt" if gpt else "llama"
    return ModelConfig(**sizes)


def write_choice(found: SearchResult, path: Path) -> None:
    """Writes the first choice to a file for `armillary-train --config`.

    Raises:
        ValueError: nothing fits, or the file cannot be written.
    """
    if not found.fitting:
        raise ValueError(f"--out {path}: nothing fits, so there is nothing to write")
    best = found.fitting[0]
    about = f"{best.candidate}, predicted by armillary-plan to be fastest on {found.cluster.name}"
    write(path, RECIPES[found.plan.model], config_of(found, best), about)


def command_line(found: SearchResult, choice: Choice, config: Path | None = None, data: Path | str = "DATA") -> str:
    """For every node: torchrun, which starts a process for each accelerator and finds the others at HEAD_NODE.

    Args:
        config: the file that has the choice; by default all of it stands in flags.
    """
    cluster = found.cluster
    nodes = [f"--nnodes {cluster.nodes}", "--rdzv-backend c10d", "--rdzv-endpoint HEAD_NODE:29500"]
    start = ["torchrun", *(nodes if cluster.nodes > 1 else ["--standalone"])]
    start += [f"--nproc-per-node {cluster.ranks_per_node}", "-m armillary.train"]
    given = flags(RECIPES[found.plan.model], config_of(found, choice)) if config is None else ["--config", str(config)]
    return " ".join([*start, shlex.join([*given, "--data.path", str(data)])])
