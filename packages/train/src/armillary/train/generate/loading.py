"""Loads a model's weights, sharded over all ranks."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from armillary.core import build_mesh, world_size
from armillary.data.console import one_line
from armillary.models import GPT, GPTConfig, Llama, LlamaConfig, load_pretrained, pretrained_config
from armillary.models.parts import weight_map
from armillary.train.build import precision, shard_model
from armillary.train.checkpoint.folder import CheckpointFolder
from armillary.train.checkpoint.manifest import Damaged
from armillary.train.checkpoint.state import SavedCheckpoint
from armillary.train.config.sections import Config, ParallelConfig
from armillary.train.generate.command import PROGRAM, Generate
from armillary.train.generate.source import ModelSource
from armillary.train.runtime.health.ranks import Ranks

TIMEOUT = timedelta(minutes=30)
"""Time-out of collectives: long enough for the slowest rank to read its weights."""


def load_model(
    options: Generate, source: ModelSource, device: torch.device, ranks: Ranks
) -> tuple[Llama | GPT, int | None]:
    """Returns the model with its weights, and the step of its checkpoint (None for a Hugging Face folder). Collective.

    Raises:
        ValueError: no checkpoint is intact, or weights or --tp do not fit the model; on every rank.
    """
    if source.checkpoints is None:
        weight_map(source.folder)  # raises for a folder without weights, before memory is allocated for them
        model = empty_model(options, pretrained_config(source.folder), device)
        ranks.on_all(lambda: load_pretrained(model, source.folder))
        return model, None
    checkpoint = intact_checkpoint(source.checkpoints, source.step, ranks)
    model = empty_model(options, checkpoint.config(), device)
    state = get_model_state_dict(model)
    ranks.on_all(lambda: checkpoint.tensors.fill({"model": state}))
    set_model_state_dict(model, state)
    return model, checkpoint.manifest.step


def intact_checkpoint(folder: CheckpointFolder, step: int | None, ranks: Ranks) -> SavedCheckpoint:
    """Returns the checkpoint of `step`, by default the newest intact one. Collective.

    Raises:
        ValueError: the checkpoint of `step` is damaged, or no checkpoint is intact.
    """
    if step is not None:
        try:
            return SavedCheckpoint.open(folder, step, ranks)
        except Damaged as damage:
            raise ValueError(f"{folder.path_of(step)}: {damage}; give another --step") from damage
    checkpoint = SavedCheckpoint.newest(folder, ranks)
    if checkpoint is None:
        raise ValueError(f"{folder.path}: no checkpoint in it yet")
    for damaged_step, fault in checkpoint.newer_faults.items() if ranks.rank == 0 else ():
        line = f"{PROGRAM}: step-{damaged_step}: {fault}; going back to step-{checkpoint.manifest.step}"
        print(one_line(line), file=sys.stderr)
    return checkpoint


def empty_model(options: Generate, sizes: LlamaConfig | GPTConfig, device: torch.device) -> Llama | GPT:
    """Returns the model sharded over all ranks, with weights that are allocated but not filled.

    Raises:
        ValueError: `--tp` does not divide the number of ranks, or does not fit the model.
    """
    ranks = world_size()
    if ranks % options.tp:
        raise ValueError(f"--tp {options.tp}: it must divide the number of ranks, {ranks}")
    # Ranks of `ring` share one text: they agree on its tokens, and FSDP shards the weights over them.
    config = Config(parallel=ParallelConfig(attention="ring"), train=options.train)
    mesh = build_mesh(device.type, ring=ranks // options.tp, tp=options.tp, timeout=TIMEOUT, high_priority=())
    model, _ = shard_model(sizes, config, mesh, precision(config, device))
    model.to_empty(device=device)
    return model
