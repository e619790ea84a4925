"""Loads a model's weights, sharded over the mesh of all ranks."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from armillary.core import build_mesh, world_size
from armillary.data.console.exit import one_line
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, load_pretrained, pretrained_config
from armillary.models.hub.folder import weight_map
from armillary.train.build import precision, shard_model
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.reader import load
from armillary.train.checkpoint.restoring import find_fault, newest_intact
from armillary.train.checkpoint.state import saved_config
from armillary.train.config import Config, ModelConfig
from armillary.train.generate.command import PROGRAM, Generate
from armillary.train.generate.source import ModelSource
from armillary.train.parallel import choose_axes, mesh_axes
from armillary.train.runtime.health.ranks import Ranks, convert_dcp_errors

TIMEOUT = timedelta(minutes=30)
"""Time-out of collectives: long enough for the slowest rank to read its weights."""


def load_model(
    options: Generate, source: ModelSource, device: torch.device, ranks: Ranks
) -> tuple[Llama | GPT, int | None]:
    """Returns the model with its weights, and the step of its checkpoint (None for a Hugging Face folder). Collective.

    Raises:
        ValueError: no checkpoint is intact, or weights or mesh do not fit the model; on every rank.
    """
    if source.checkpoints is None:
        weight_map(source.folder)  # raises for a folder without weights, before memory is allocated for them
        model = empty_model(options, pretrained_config(source.folder), device)
        ranks.on_all(lambda: load_pretrained(model, source.folder))
        return model, None
    step = intact_step(source.checkpoints, source.step, ranks)
    path = source.checkpoints.path_of(step)
    manifest = Manifest.read(path)
    model = empty_model(options, saved_config(path, manifest), device)
    state = get_model_state_dict(model)
    with convert_dcp_errors():
        load({"model": state}, path, manifest.files, process_group=ranks.group)
    set_model_state_dict(model, state)
    return model, step


def intact_step(folder: CheckpointFolder, step: int | None, ranks: Ranks) -> int:
    """Returns `step` if its checkpoint is intact, or by default the step of the newest intact one. Collective.

    Raises:
        ValueError: the checkpoint of `step` is damaged, or no checkpoint is intact.
    """
    if step is not None:
        if (fault := find_fault(folder, step, ranks)) is not None:
            raise ValueError(f"{folder.path_of(step)}: {fault}; give another --step")
        return step
    newest = newest_intact(folder, ranks)
    if newest.step is None:
        raise ValueError(f"{folder.path}: no checkpoint in it yet")
    for damaged_step, fault in newest.faults.items() if ranks.rank == 0 else ():
        line = f"{PROGRAM}: step-{damaged_step}: {fault}; going back to step-{newest.step}"
        print(one_line(line), file=sys.stderr)
    return newest.step


def empty_model(options: Generate, sizes: LlamaConfig | GPTConfig, device: torch.device) -> Llama | GPT:
    """Returns the model sharded over the mesh of all ranks, with weights that are allocated but not filled.

    Raises:
        ValueError: the product of the axes is not the number of ranks, or model or method do not fit the axes.
    """
    kv_heads = sizes.heads if isinstance(sizes, GPTConfig) else sizes.kv_heads
    # `choose_axes` reads only the numbers of heads; `dim` must be a multiple of them.
    head_counts = ModelConfig(dim=sizes.heads, heads=sizes.heads, kv_heads=kv_heads)
    config = Config(model=head_counts, parallel=options.parallel, train=options.train)
    axes = mesh_axes(config, choose_axes(config, world_size()))
    mesh = build_mesh(device.type, **axes, timeout=TIMEOUT, high_priority=())
    model, _ = shard_model(sizes, config, mesh, precision(config, device))
    model.to_empty(device=device)
    return model
