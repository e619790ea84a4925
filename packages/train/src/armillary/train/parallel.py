"""Which device and which mesh axes a run has."""

from __future__ import annotations

import os
from math import isqrt

import torch
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import compat
from armillary.train.config import ParallelConfig, TrainConfig

DATA_AXES = ("replicate", "shard", "ring", "ulysses")
"""Axes over which tokens are spread: gradients and losses are summed over all of them."""


def choose_device(config: TrainConfig) -> torch.device:
    """This rank's device: its own GPU where this machine has one for each of its ranks, else the CPU.

    Raises:
        ValueError: cuda is asked for and there are fewer GPUs than ranks; on every rank of the machine.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if config.device == "cuda" and gpus < ranks:
        raise ValueError(f"--train.device cuda: {ranks} ranks on this machine, which has {gpus} GPUs; use cpu or auto")
    if config.device == "cpu" or gpus < ranks:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def choose_axes(config: ParallelConfig, world: int) -> dict[str, int]:
    """Sizes of all axes for `world` ranks, the open ones filled in.

    Open axes get what the given ones leave, split so that ulysses <= ring (any head count allows a small ulysses).
    Where the given ones do not divide `world` the product comes out wrong, and `build_mesh` refuses it.
    """
    given = config.replicate * config.shard * (config.ring or 1) * (config.ulysses or 1) * config.tp
    left = max(1, world // max(given, 1))
    ring, ulysses = config.ring, config.ulysses
    if ulysses is None:
        ulysses = left if ring is not None else max(u for u in range(1, isqrt(left) + 1) if left % u == 0)
        left //= ulysses
    return {
        "replicate": config.replicate,
        "shard": config.shard,
        "ring": left if ring is None else ring,
        "ulysses": ulysses,
        "tp": config.tp,
    }


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of all ranks that hold tokens of one step."""
    return compat.flatten(mesh, DATA_AXES, "data")
