"""Which device and which mesh axes a run has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import gcd, isqrt

import torch
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.registry import MethodOptions, named_method
from armillary.core import compat
from armillary.train.config import Config, TrainConfig
from armillary.train.model import model_config

DATA_AXES = ("replicate", "shard", "nodes", "devices", "ring", "ulysses")
"""Axes over which tokens are spread: gradients and losses are summed over all of them."""


def choose_device(config: TrainConfig, flag: str = "--train.device") -> torch.device:
    """Returns this rank's device: its own GPU where this machine has one for each of its ranks, else the CPU.

    Args:
        flag: the command's name of `config.device`.

    Raises:
        ValueError: cuda is asked for and there are fewer GPUs than ranks; on every rank of the machine.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if config.device == "cuda" and gpus < ranks:
        raise ValueError(f"{flag} cuda: {ranks} ranks on this machine, which has {gpus} GPUs; use cpu or auto")
    if config.device == "cpu" or gpus < ranks:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def choose_axes(config: Config, world: int) -> dict[str, int]:
    """Sizes of all axes for `world` ranks.

    Axes that are not given share what the others leave, so that ulysses <= ring (any head count allows a small
    ulysses). Where the given ones do not divide `world` the product comes out wrong, and `build_mesh` refuses it.
    """
    parallel = config.parallel
    ring, ulysses = (parallel.ring, parallel.ulysses) if parallel.cp is None else split_cp(config, parallel.cp)
    given = parallel.replicate * parallel.shard * (ring or 1) * (ulysses or 1) * parallel.tp
    left = max(1, world // max(given, 1))
    if ulysses is None:
        ulysses = left if ring is not None else max(u for u in range(1, isqrt(left) + 1) if left % u == 0)
        left //= ulysses
    return {
        "replicate": parallel.replicate,
        "shard": parallel.shard,
        "ring": left if ring is None else ring,
        "ulysses": ulysses,
        "tp": parallel.tp,
    }


def mesh_axes(config: Config, axes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the axes of the mesh: `axes` with `ring` split into `nodes` and `devices`, if the method works on these.

    By default a node has as many ranks as this machine.

    Raises:
        ValueError: nodes that do not divide the ring, or are for another method.
    """
    nodes = config.parallel.nodes
    method = named_method(config.parallel.attention, MethodOptions(nodes=nodes))
    if nodes is None and "nodes" in method.sequence.axes and "LOCAL_WORLD_SIZE" in os.environ:
        devices = gcd(axes["ring"], max(1, int(os.environ["LOCAL_WORLD_SIZE"]) // (axes["ulysses"] * axes["tp"])))
        if 1 < devices < axes["ring"]:
            method = named_method(config.parallel.attention, MethodOptions(nodes=axes["ring"] // devices))
    return method.mesh_axes(axes)


def split_cp(config: Config, cp: int) -> tuple[int, int]:
    """(ring, ulysses) of a context-parallel degree: as many ranks on the head axis as divide heads, key heads and a
    node, whose links its all-to-alls stay on; the rest on the ring."""
    model = model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)
    tp = config.parallel.tp
    node = int(os.environ.get("LOCAL_WORLD_SIZE", cp * tp))
    ulysses = gcd(cp, model.heads // tp, model.kv_heads // tp, max(1, node // tp))
    return cp // ulysses, ulysses


def batch_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Its axes of several ranks, and `ring`. Of any op over all axes torch (2.15) weighs placements for seconds."""
    return mesh[tuple(name for i, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(i) > 1 or name == "ring")]


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of all ranks that hold tokens of one step."""
    names = mesh.mesh_dim_names or ()
    return compat.flatten(mesh, [name for name in DATA_AXES if name in names], "data")
