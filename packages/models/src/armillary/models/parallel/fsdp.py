"""Applies FSDP2 over all axes that shard batch rows or tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from armillary.core import accumulation_dtype, sum_gradients
from armillary.core.parts import compat
from armillary.models.block import Block
from armillary.models.gpt import GPT
from armillary.models.llama import Llama

ZeroStage = Literal[1, 2, 3]

SHARDING = ("shard", "nodes", "devices", "ring", "ulysses")
"""Mesh axes over which parameters are sharded. They are flattened into one axis."""


def shard_parameters(
    model: Llama | GPT, mesh: DeviceMesh, precision: torch.dtype, cpu_offload: bool = False, zero_stage: ZeroStage = 3
) -> None:
    """Applies FSDP2 in place: shards parameters over the mesh axes `SHARDING`, and replicates over `replicate` (HSDP).

    Each block is a unit of FSDP2, whose parameters are gathered when it runs. So are the embedding table and the head,
    if they are not tied. Gradients are summed over all ranks, not averaged: divide the loss by the global number of
    labels.

    Args:
        mesh: a mesh with some of these axes, and possibly others, such as `build_mesh` returns.
        precision: dtype of forward and backward. Gradients are reduced in float32 (float64 for float64).
        cpu_offload: True keeps parameters, gradients and optimizer state in the host's memory.
        zero_stage: 3 frees a block's gathered parameters after its forward, and gathers them again in backward. 2 keeps
            them from forward to backward. Both shard gradients and optimizer state. 1 shards only optimizer state: call
            `armillary.models.parallel.begin_micro_batch` before each micro-batch of a step. Without these calls, 1 is
            the same as 2.

    Raises:
        ValueError: the mesh has none of the sharding axes.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=accumulation_dtype(precision))
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    fsdp_mesh = sharding_mesh(mesh)
    for module, keep in units(model):  # inner modules first: a unit has the parameters that no inner unit has
        fully_shard(
            module,
            mesh=fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            reshard_after_forward=zero_stage == 3 and not keep,
        )
    sum_gradients(model)  # FSDP2 would average them


def begin_micro_batch(model: nn.Module, last: bool) -> None:
    """Starts a micro-batch under ZeRO stage 1. Call it on every rank before each micro-batch's forward.

    Gathered parameters and unsharded gradients stay until the step's last micro-batch. So a step gathers
    parameters once, and reduces gradients once.

    Args:
        model: a model after `shard_parameters`.
        last: True for the last micro-batch of a step.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)  # reduce-scatter gradients only in the last backward
    model.set_reshard_after_backward(last)  # free gathered parameters only after the last backward
    model.set_is_last_backward(last)  # the last backward waits at its end for the reductions


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh for FSDP2: 1-D over the sharding axes, or 2-D [replicate, sharding] for HSDP."""
    flat_mesh = compat.flatten(mesh, sharding_axes(mesh), "fsdp")
    if "replicate" in (mesh.mesh_dim_names or ()) and mesh["replicate"].size() > 1:
        return compat.join(mesh["replicate"], flat_mesh)
    return flat_mesh


def sharding_axes(mesh: DeviceMesh) -> list[str]:
    """Returns the axes of the mesh over which parameters are sharded.

    Raises:
        ValueError: the mesh has none of `SHARDING`.
    """
    names = mesh.mesh_dim_names or ()
    axes = [name for name in SHARDING if name in names]
    if not axes:
        available = ", ".join(names) or "no names"
        raise ValueError(f"parameters are sharded over any of {', '.join(SHARDING)}; the mesh has {available}")
    return axes


def units(model: Llama | GPT) -> Iterator[tuple[nn.Module, bool]]:
    """Yields (module, keep) for each FSDP unit, inner modules first.

    `keep` is True for units that stay gathered from forward to backward, under every ZeRO stage.
    """
    yield from ((module, False) for module in model.modules() if isinstance(module, Block))
    if isinstance(model, Llama) and model.lm_head is not None:
        yield model.model.embed_tokens, False
        yield model.lm_head, True  # its backward comes right after its forward
    yield model, True  # among others the final norm and tied weights, used last in forward and first in backward
