"""The trainer's configuration of a choice: as a file for `armillary-train --config`, or as a `torchrun` command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.core.internal import parse_toml
from armillary.models import GPTConfig
from armillary.plan.arguments import Model, is_hybrid, pretrained_folder
from armillary.plan.search.search import Choice, SearchResult
from armillary.train import Config, DataConfig, ModelConfig, ParallelConfig
from armillary.train.config import GPT_FIELDS, SIZES, flag, flat, overlay_settings, recipe_config, toml_value

# For each model preset, the recipe that has suitable hyperparameters.
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


def recipe_name(result: SearchResult) -> str:
    """Returns the recipe with suitable hyperparameters: of the preset (`RECIPES`), for a folder "finetune"."""
    return RECIPES.get(result.options.model, "finetune")


def trainer_config(result: SearchResult, choice: Choice) -> Config:
    """Returns the trainer's configuration for a choice. Learning rate, steps and saving are the recipe's."""
    folder = pretrained_folder(result.options.model)
    recipe = recipe_config(recipe_name(result))
    data = DataConfig(
        sequence_length=result.length, global_batch_size=result.options.rows, layout=choice.candidate.layout
    )
    if result.documents is not None:
        data = replace(data, documents=True, packing="best_fit")
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
        data=data,
        optimizer=replace(recipe.optimizer, cpu_offload=choice.job.on_host),
        train=replace(recipe.train, accumulation=1),
    )


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
    """Writes the first choice, which fits, to a file for `armillary-train --config`."""
    best = result.fitting[0]
    comment = f"{best.candidate}, predicted by armillary-plan to be fastest on {result.cluster.name}"
    write_toml(path, recipe_name(result), trainer_config(result, best), comment)


def command_line(result: SearchResult, choice: Choice, config: Path | None = None, data: Path | str = "DATA") -> str:
    """Returns the `torchrun` command to start on every node. Its HEAD_NODE stands for the name of one of the nodes.

    It names the file `config` if there is one, else it has the configuration's flags.
    """
    cluster, data = result.cluster, result.options.documents or data
    nodes = [f"--nnodes {cluster.nodes}", "--rdzv-backend c10d", "--rdzv-endpoint HEAD_NODE:29500"]
    launcher = ["torchrun", *(nodes if cluster.nodes > 1 else ["--standalone"])]
    launcher += [f"--nproc-per-node {cluster.ranks_per_node}", "-m armillary.train"]
    arguments = ["--config", str(config)] if config else flags(recipe_name(result), trainer_config(result, choice))
    return " ".join([*launcher, shlex.join([*arguments, "--data.path", str(data)])])


def write_toml(path: Path, recipe: str, config: Config, comment: str) -> None:
    """Writes a configuration to a TOML file, with `comment` as its first line."""
    text = toml_text(recipe, config, comment)
    settings = parse_toml(text)
    # Read the text back: a user's recipe may have values, such as objects, that TOML cannot express.
    if overlay_settings(recipe_config(settings.pop("recipe")), settings, path) != config:
        raise ValueError(f"--out {path}: the recipe {recipe} has a value that TOML cannot express; name another recipe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error


def toml_text(recipe: str, config: Config, comment: str) -> str:
    """Returns TOML with the recipe's name, and a table for each section whose settings differ from the recipe's."""
    sections = dict[str, list[str]]()
    for name, value in changes(recipe, config):
        section, _, key = flag(name).rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {toml_value(value)}")
    tables = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n".join([f"# {comment}", f"recipe = {toml_value(recipe)}", *tables, ""])


def flags(recipe: str, config: Config) -> list[str]:
    """Returns the arguments of `armillary-train` that give this configuration."""
    words = ["--recipe", recipe]
    for name, value in changes(recipe, config):
        if isinstance(value, bool):  # --section.no-key
            section, _, key = flag(name).rpartition(".")
            words.append(f"--{section}.{'' if value else 'no-'}{key}")
        else:
            words += [f"--{flag(name)}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def changes(recipe: str, config: Config) -> Iterator[tuple[str, Any]]:
    """Returns ("section.key", value) of each setting that differs from the recipe's."""
    defaults = dict(flat(recipe_config(recipe)))
    return ((name, value) for name, value in flat(config) if value != defaults[name])
