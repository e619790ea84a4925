"""Converts a choice of the search to the trainer's configuration, as a file or as a `torchrun` command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.models import GPTConfig
from armillary.plan.presets import Model, is_hybrid, pretrained_folder
from armillary.plan.search.search import Choice, SearchResult
from armillary.plan.train_config import flags, write_toml
from armillary.train import Config, DataConfig, ModelConfig, ParallelConfig
from armillary.train.config import GPT_FIELDS, SIZES, recipe_config

RECIPES = {
    "debug": "debug",
    "llama3-8b": "llama3_8b_128k",
    "llama3-70b": "llama3_70b_128k",
    "llama2-7b": "llama3_8b_128k",
    "qwen3-32b": "llama3_70b_128k",
    "gpt-3b": "gpt_wallfacer_3b",
    "gpt-7b": "gpt_wallfacer_7b",
    "hybrid-8b": "llama3_8b_128k",
}
"""For each model preset, the recipe that has suitable hyperparameters."""


def recipe_name(result: SearchResult) -> str:
    """Returns the recipe with suitable hyperparameters: of the preset (`RECIPES`), for a folder "finetune"."""
    return RECIPES.get(result.options.model, "finetune")


def trainer_config(result: SearchResult, choice: Choice) -> Config:
    """Returns the trainer's configuration for a choice.

    Learning rate, steps and saving are those of the model's recipe (`recipe_name`).
    """
    folder = pretrained_folder(result.options.model)
    recipe = recipe_config(recipe_name(result))
    return replace(
        recipe,
        model=model_flags(result.model) if folder is None else ModelConfig(pretrained=folder),
        parallel=ParallelConfig(
            **choice.candidate.parallel,
            replicate=choice.candidate.mesh.replicate,
            tp=choice.candidate.mesh.tp,
            zero_stage=choice.job.zero_stage,
            kernel=result.options.kernel,
        ),
        checkpointing=choice.job.checkpointing,
        data=data_config(result, choice),
        optimizer=replace(recipe.optimizer, cpu_offload=choice.job.on_host),
        train=replace(recipe.train, accumulation=1),
    )


def data_config(result: SearchResult, choice: Choice) -> DataConfig:
    """Returns the data section of the trainer's configuration."""
    layout, rows = choice.candidate.layout, result.options.rows
    data = DataConfig(sequence_length=result.length, global_batch_size=rows, layout=layout)
    return data if result.documents is None else replace(data, documents=True, packing="best_fit")


def model_flags(model: Model) -> ModelConfig:
    """Returns the model section of the trainer's configuration, without RoPE scaling."""
    is_gpt = isinstance(model, GPTConfig)
    names = [name for name in (GPT_FIELDS if is_gpt else SIZES) if name not in ("family", "pretrained")]
    sizes: dict[str, Any] = {name: getattr(model, name) for name in (*names, "vocab_size")}
    if is_hybrid(model) and (states := model.states) is not None:
        names = ("heads", "key_heads", "key_dim", "value_dim")
        sizes |= {f"state_{name}": getattr(states, name) for name in names} | {"conv_width": states.conv_width}
    if not isinstance(model, GPTConfig):
        sizes |= {"rope_theta": model.rope_theta, "rope_scaling": "none"}
        # None if it is the default, so that the command line stays short.
        sizes["head_dim"] = None if model.head_dim * model.heads == model.dim else model.head_dim
    sizes["family"] = "gpt" if is_gpt else "llama"
    return ModelConfig(**sizes)


def write_choice(result: SearchResult, path: Path) -> None:
    """Writes the first choice to a file for `armillary-train --config`.

    Raises:
        ValueError: nothing fits, or the file cannot be written.
    """
    if not result.fitting:
        raise ValueError(f"--out {path}: nothing fits, so there is nothing to write")
    best = result.fitting[0]
    comment = f"{best.candidate}, predicted by armillary-plan to be fastest on {result.cluster.name}"
    write_toml(path, recipe_name(result), trainer_config(result, best), comment)


def command_line(result: SearchResult, choice: Choice, config: Path | None = None, data: Path | str = "DATA") -> str:
    """Returns the `torchrun` command to start on every node. Its HEAD_NODE stands for the name of one of the nodes.

    Args:
        config: file of the choice's configuration; by default the command has the configuration's flags.
        data: token store, unless the search has one.
    """
    cluster, data = result.cluster, result.options.documents or data
    nodes = [f"--nnodes {cluster.nodes}", "--rdzv-backend c10d", "--rdzv-endpoint HEAD_NODE:29500"]
    launcher = ["torchrun", *(nodes if cluster.nodes > 1 else ["--standalone"])]
    launcher += [f"--nproc-per-node {cluster.ranks_per_node}", "-m armillary.train"]
    arguments = ["--config", str(config)] if config else flags(recipe_name(result), trainer_config(result, choice))
    return " ".join([*launcher, shlex.join([*arguments, "--data.path", str(data)])])
