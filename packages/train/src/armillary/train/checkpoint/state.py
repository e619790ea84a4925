"""The state of a run: what a checkpoint contains of it, and restoring it from the newest intact checkpoint.

The optimizer's settings are not saved. The learning rate follows from the step, and the other settings from the
configuration of the run that resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from armillary.data.console import one_line
from armillary.models import GPTConfig, LlamaConfig
from armillary.models.parts import describe, meta_model, parameter_shapes, parse
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.manifest import MANIFEST, Damaged, Manifest, checkpoint_fault, is_copy
from armillary.train.checkpoint.tensors import SavedTensors, describe_tensor, flatten
from armillary.train.config.overlay import align_columns, flag, flag_text, flat
from armillary.train.parallel import choose_axes
from armillary.train.run import Run
from armillary.train.runtime.health.ranks import Ranks
from armillary.train.runtime.random_state import random_state, seed_all, set_random_state

State = dict[str, Any]

NOT_SAVED = ("train.output",)
"""Fields that are not among the saved settings: the output folder may be moved between runs."""


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


def model_description(run: Run) -> dict[str, Any]:
    """Returns the fields of a Hugging Face config.json for the run's model."""
    # Through JSON, which turns tuples into lists: a manifest that was read from a file has lists too.
    return json.loads(json.dumps(describe(run.model.config, torch.float32)))


def settings(run: Run, ranks: int) -> dict[str, str]:
    """Returns the fields of a run's configuration as texts, by flag without the leading dashes.

    Mesh axes and device are the actual ones, also if the configuration leaves the choice open. `ranks` is added.
    """
    flags = {flag(name): flag_text(value) for name, value in flat(run.config) if name not in NOT_SAVED}
    axes = {f"parallel.{axis}": str(size) for axis, size in choose_axes(run.config, ranks).items()}
    return flags | axes | {"train.device": run.device.type, "ranks": str(ranks)}


# -- the newest intact checkpoint --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint with the checksums and headers that its manifest states; no data has been read into tensors.

    Args:
        newer_faults: the faults of newer checkpoints, by step.
    """

    path: Path
    manifest: Manifest
    tensors: SavedTensors
    newer_faults: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def open(cls, folder: CheckpointFolder, step: int, ranks: Ranks) -> SavedCheckpoint:
        """Verifies every byte of a checkpoint. Collective.

        Raises:
            Damaged: the checkpoint is not intact.
            ValueError: it has another format, or may not be read.
        """
        # Checksums need every byte, so ranks share the files. Headers are small: one rank reads and sends them all.
        faults = ranks.on_all(lambda: checkpoint_fault(folder, step, ranks.rank, ranks.size))
        path = folder.path_of(step)

        def read_headers() -> tuple[Manifest, SavedTensors] | str:
            try:
                manifest = Manifest.read(path)
                return manifest, SavedTensors(path, manifest.files)
            except Damaged as damage:
                return str(damage)

        answer = next(filter(None, faults), None) or ranks.on_first(read_headers)
        if isinstance(answer, str):
            raise Damaged(answer)
        manifest, tensors = answer
        tensors.folder = path  # hosts may mount the same folder in different places
        return cls(path, manifest, tensors)

    @classmethod
    def newest(cls, folder: CheckpointFolder, ranks: Ranks, advice: str = "") -> SavedCheckpoint | None:
        """Verifies checkpoints, newest first, until one is intact; returns None if there are none. Collective.

        Args:
            advice: end of the error message if none is intact.

        Raises:
            ValueError: there are checkpoints, and none is intact; or one has another format, or may not be read.
        """
        faults: dict[int, str] = {}
        for step in reversed(ranks.on_first(folder.steps)):
            try:
                return replace(cls.open(folder, step, ranks), newer_faults=faults)
            except Damaged as damage:
                faults[step] = str(damage)
        if faults:
            reasons = "; ".join(f"step-{step}: {fault}" for step, fault in faults.items())
            raise ValueError(f"no checkpoint in {folder.path} is intact ({reasons}){advice}")
        return None

    def config(self) -> LlamaConfig | GPTConfig:
        """Returns the model's config, after comparing it with the saved tensors.

        Raises:
            ValueError: the manifest's model is invalid, or does not have the saved tensors.
        """
        source = f"{self.path / MANIFEST}: model"
        try:
            config = parse(self.manifest.model)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        saved = self.tensors.describe("model.")
        # A manifest can state any number of layers. `parameter_shapes` builds the names of all, so the number is
        # checked first: a layer has at least one tensor.
        if config.layers > len(saved):
            raise ValueError(f"{source}: {config.layers} layers, but {len(saved)} tensors were saved")
        shapes = parameter_shapes(meta_model, config)
        expected = {f"model.{name}": describe_tensor(shape, torch.float32) for name, shape in shapes.items()}
        if difference := differences(saved, expected):
            raise ValueError(f"{source}: the saved tensors are of another model ({difference})")
        return config


def restore(run: Run, folder: CheckpointFolder, ranks: Ranks, say: Callable[[str], None]) -> Manifest | None:
    """Restores the newest intact checkpoint; returns its manifest, None if there are no checkpoints. Collective.

    Removes incomplete checkpoints; reports and renames damaged ones. If the checkpoint was saved by another number of
    ranks, random states are seeded from seed, step and rank.

    Raises:
        ValueError: no checkpoint is intact, or the newest intact one is of another model or of other rows; on every
            rank. Complete checkpoints and the model are then unchanged. Also if tensors cannot be read; the model may
            then be partly loaded.
        OSError: the folder cannot be changed; on every rank.
    """
    ranks.on_first(folder.clear)
    checkpoint = SavedCheckpoint.newest(folder, ranks, "; name another --train.output to start anew")
    if checkpoint is None:
        return None
    path, manifest, tensors = checkpoint.path, checkpoint.manifest, checkpoint.tensors
    # 1. Checks come before any change: a run that is refused must leave damaged checkpoints where they are. DCP's
    # state dict has the optimizer's settings (`param_groups`), which a checkpoint has not.
    state = training_state(run)
    param_groups = state["optimizer"].pop("param_groups")
    current = {name: describe_tensor(x.shape, x.dtype) for name, x in flatten(state).items() if isinstance(x, Tensor)}
    difference = differences(manifest.model, model_description(run)) or differences(
        tensors.describe("model.", "optimizer.state."), current
    )
    if difference:
        raise ValueError(
            f"{path} was made by another model: {difference}; name another --train.output, or the model that made it"
        )
    try:
        run.training.load_state_dict(manifest.loader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; name another --train.output, or the data that it was made with") from error
    # 2. Damaged checkpoints get another name, so that training can save these steps again.
    for step, fault in checkpoint.newer_faults.items():
        damaged_path = ranks.on_first(lambda step=step: folder.set_aside(step, is_copy(folder, step)))
        say(f"step-{step}: {fault}; kept as {damaged_path}, resuming from step-{manifest.step}")
    # 3. Tensors are loaded last, since loading overwrites the model in place. All generators are seeded first, for
    # those whose state the checkpoint lacks.
    seed_all(run.config.train.seed, manifest.step, ranks.rank)
    prefix, random = f"random.rank-{ranks.rank}.", random_state(run.device)
    saved = tensors.describe(prefix) if manifest.ranks == ranks.size else {}
    random = {name: x for name, x in random.items() if saved.get(prefix + name) == describe_tensor(x.shape, x.dtype)}
    try:
        ranks.on_all(lambda: tensors.fill({**state, "random": {f"rank-{ranks.rank}": random}}))
        optimizer = {**state["optimizer"], "param_groups": param_groups}
        set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
        ranks.on_all(lambda: set_random_state(random, run.device))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; move it to another folder to resume without it") from error
    # 4. Print what the configuration changes.
    before, after = manifest.settings, settings(run, ranks.size)
    names = [name for name in after if before.get(name, after[name]) != after[name]]
    changes = align_columns([(name, one_line(before[name]), after[name]) for name in names])
    say("\n  ".join([f"resuming from {path}", *changes]))
    return manifest


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
