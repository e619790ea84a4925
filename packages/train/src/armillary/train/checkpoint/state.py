"""The state dict of a run: saving and loading.

The optimizer's settings are not saved. The learning rate follows from the step, and the other settings from the
configuration of the run that resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from armillary.models import GPTConfig, LlamaConfig
from armillary.models.parts import describe, meta_model, parameter_shapes, parse
from armillary.train.checkpoint.manifest import MANIFEST, Manifest
from armillary.train.checkpoint.reader import describe_tensor, load, saved_tensors
from armillary.train.run import Run
from armillary.train.runtime.health.ranks import Ranks, convert_dcp_errors
from armillary.train.runtime.random_state import random_state, seed_all, set_random_state

State = dict[str, Any]


def saved_state(run: Run, rank: int) -> State:
    """Returns the tensors of a checkpoint: the shards of model and optimizer, and this rank's random state."""
    state = training_state(run)
    optimizer = {"state": state["optimizer"]["state"]}
    return {"model": state["model"], "optimizer": optimizer, "random": {f"rank-{rank}": random_state(run.device)}}


def training_state(run: Run) -> State:
    """Returns the state dicts of model and optimizer. Creates the optimizer's state if there has been no step."""
    if not run.optimizer.state:
        get_optimizer_state_dict(run.model, run.optimizer)  # torch creates the state by a step with learning rate 0
        for values in run.optimizer.state.values():
            values["step"].zero_()  # AdamW's own count, which must not include that step
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def load_state(run: Run, path: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Loads model, optimizer and random states. Collective.

    If the checkpoint was saved by another number of ranks, random states are seeded from seed, step and rank.

    Raises:
        ValueError: a tensor cannot be read, or a random state is invalid; on every rank.
    """
    # 1. Seed all generators first, for those whose state the checkpoint lacks.
    seed_all(run.config.train.seed, manifest.step, ranks.rank)
    # 2. DCP fills the tensors of a state dict in place. The optimizer's settings (`param_groups`) are taken out before,
    # since the checkpoint has none, and put back unchanged.
    state = training_state(run)
    param_groups = state["optimizer"].pop("param_groups")
    random = random_state_to_fill(run, path, manifest, ranks.rank) if manifest.ranks == ranks.size else {}
    state |= {"random": {f"rank-{ranks.rank}": random}} if random else {}
    with convert_dcp_errors():
        load(state, path, manifest.files, process_group=ranks.group)
    # 3. Copy the state dict into model, optimizer and generators.
    optimizer = {**state["optimizer"], "param_groups": param_groups}
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
    ranks.on_all(lambda: set_random_state(random, run.device))


def random_state_to_fill(run: Run, path: Path, manifest: Manifest, rank: int) -> State:
    """Returns tensors for DCP to fill, of the random generators that both the checkpoint and this process have."""
    prefix = f"random.rank-{rank}."
    saved, current = saved_tensors(path, manifest.files, prefix), random_state(run.device)
    return {name: x for name, x in current.items() if saved.get(prefix + name) == describe_tensor(x.shape, x.dtype)}


def model_description(run: Run) -> dict[str, Any]:
    """Returns the fields of a Hugging Face config.json for the run's model."""
    # Through JSON, which turns tuples into lists: a manifest that was read from a file has lists too.
    return json.loads(json.dumps(describe(run.model.config, torch.float32)))


def saved_config(folder: Path, manifest: Manifest) -> LlamaConfig | GPTConfig:
    """Returns the model's config in the manifest of a checkpoint, after comparing it with the saved tensors.

    Raises:
        Damaged, ValueError: the manifest's model is invalid, or does not have the saved tensors.
    """
    try:
        config = parse(manifest.model)
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST}: model: {error}") from error
    saved = saved_tensors(folder, manifest.files, "model.")
    # A manifest can state any number of layers. `parameter_shapes` builds the names of all, so the number is checked
    # first: a layer has at least one tensor.
    if config.layers > len(saved):
        raise ValueError(f"{folder / MANIFEST}: model: {config.layers} layers, but {len(saved)} tensors were saved")
    shapes = parameter_shapes(meta_model, config)
    expected = {f"model.{name}": describe_tensor(shape, torch.float32) for name, shape in shapes.items()}
    if difference := differences(saved, expected):
        raise ValueError(f"{folder / MANIFEST}: model: the saved tensors are of another model ({difference})")
    return config


def check_model(run: Run, path: Path, manifest: Manifest, tensors: Mapping[str, str]) -> None:
    """Raises ValueError if a checkpoint is of another model than `run`.

    Args:
        tensors: the run's model and optimizer, from `describe_tensors`.
    """
    difference = differences(manifest.model, model_description(run)) or differences(
        saved_tensors(path, manifest.files, "model.", "optimizer.state."), tensors
    )
    if difference:
        raise ValueError(
            f"{path} was made by another model: {difference}; name another --train.output, or the model that made it"
        )


def describe_tensors(state: State) -> dict[str, str]:
    """Returns descriptions of the model's and the optimizer's tensors, by the names that DCP gives them."""
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.state.{name}.{key}": value for key, value in values.items()}
    return {name: describe_tensor(x.shape, x.dtype) for name, x in tensors.items() if isinstance(x, Tensor)}


def differences(saved_values: Mapping[str, Any], current: Mapping[str, Any], limit: int = 3) -> str:
    """Describes the first `limit` differences between saved and current values; "" if they are equal."""
    # A name that only one side has differs from one whose value is None.
    names = [
        n
        for n in {**saved_values, **current}
        if (n in saved_values, saved_values.get(n)) != (n in current, current.get(n))
    ]
    lines = [
        f"{name} is {saved_values.get(name, 'absent')} there and {current.get(name, 'absent')} here" for name in names
    ]
    suffix = f", and {len(lines) - limit} more" if len(lines) > limit else ""
    return ", ".join(lines[:limit]) + suffix
