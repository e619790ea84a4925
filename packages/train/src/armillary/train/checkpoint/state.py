"""The state dict of a run: saving and loading.

Learning rates are no part of it, since they follow from the step alone; nor are the optimizer's other settings, which
are those of the resumed run's configuration.
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
from armillary.models.hub import describe
from armillary.models.hub.configs import parse
from armillary.models.hub.tensors import parameter_shapes
from armillary.models.initialize import meta_model
from armillary.train.checkpoint.manifest import MANIFEST, Manifest
from armillary.train.run import Run
from armillary.train.runtime.checkpoint.reader import load, saved_shapes
from armillary.train.runtime.health.ranks import Ranks, errors_as_ours
from armillary.train.runtime.random_state import random_state, seed_all, set_random_state

State = dict[str, Any]


def saved_state(run: Run, rank: int) -> State:
    """What DCP saves, tensors alone: model and optimizer sharded, random states of each rank."""
    state = training_state(run)
    optimizer = {"state": state["optimizer"]["state"]}
    return {"model": state["model"], "optimizer": optimizer, "random": {f"rank-{rank}": random_state(run.device)}}


def training_state(run: Run) -> State:
    """Model and optimizer, whose state is made where there has been no step yet."""
    if not run.optimizer.state:
        get_optimizer_state_dict(run.model, run.optimizer)  # makes it by a step of size 0
        for kept in run.optimizer.state.values():
            kept["step"].zero_()  # which must not count
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def load_state(run: Run, place: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Loads model, optimizer and random numbers. Collective.

    With another number of ranks random numbers are those of the seed, the step and the rank.

    Raises:
        ValueError: something in it is not what it should be; on every rank.
    """
    seed_all(run.config.train.seed, manifest.step, ranks.rank)
    state = training_state(run)
    groups = state["optimizer"].pop("param_groups")
    random = saved_random_state(run, place, ranks.rank) if manifest.ranks == ranks.size else {}
    state |= {"random": {f"rank-{ranks.rank}": random}} if random else {}
    with errors_as_ours():
        load(state, place, process_group=ranks.group)
    optimizer = {**state["optimizer"], "param_groups": groups}
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
    ranks.agree(lambda: set_random_state(random, run.device))


def saved_random_state(run: Run, place: Path, rank: int) -> State:
    """Room for the random state that was saved of this rank: of the generators that it has here too."""
    saved = saved_shapes(place, f"random.rank-{rank}.")
    here = random_state(run.device)
    return {name: x for name, x in here.items() if saved.get(f"random.rank-{rank}.{name}") == tuple(x.shape)}


def model_description(run: Run) -> dict[str, Any]:
    """The fields of a Hugging Face config.json, as they are after a while on disk."""
    return json.loads(json.dumps(describe(run.model.config, torch.float32)))


def saved_config(folder: Path, manifest: Manifest) -> LlamaConfig | GPTConfig:
    """Returns the model's config in the manifest of a checkpoint, after comparing it with the saved tensors' shapes.

    Raises:
        Damaged, ValueError: the manifest describes no model, or another one than was saved.
    """
    try:
        config = parse(manifest.model)
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST}: model: {error}") from error
    shapes = {name.removeprefix("model."): shape for name, shape in saved_shapes(folder, "model.").items()}
    # The manifest may state any number of layers; their names are only listed if there are as many tensors.
    if config.layers > len(shapes):
        raise ValueError(f"{folder / MANIFEST}: model: {config.layers} layers, and {len(shapes)} tensors were saved")
    if difference := differences(shapes, parameter_shapes(meta_model, config)):
        raise ValueError(f"{folder / MANIFEST}: model: another one was saved ({difference})")
    return config


def check_model(run: Run, place: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses the checkpoint of another model.

    Raises:
        ValueError: says what differs.
    """
    differing = differences(manifest.model, model_description(run)) or differences(
        saved_shapes(place, "model.", "optimizer.state."), shapes
    )
    if differing:
        raise ValueError(
            f"{place} was made by another model: {differing}; name another --train.output, or the model that made it"
        )


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    """Of the model's and the optimizer's tensors, by the names that DCP gives them."""
    found: dict[str, Any] = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, kept in state["optimizer"]["state"].items():
        found |= {f"optimizer.state.{name}.{key}": value for key, value in kept.items()}
    return {name: tuple(tensor.shape) for name, tensor in found.items() if isinstance(tensor, Tensor)}


def differences(there: Mapping[str, Any], here: Mapping[str, Any], shown: int = 3) -> str:
    """What differs, in words; nothing if nothing does."""
    names = [n for n in {**there, **here} if (n in there, there.get(n)) != (n in here, here.get(n))]
    said = [f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here" for name in names]
    more = f", and {len(said) - shown} more" if len(said) > shown else ""
    return ", ".join(said[:shown]) + more
