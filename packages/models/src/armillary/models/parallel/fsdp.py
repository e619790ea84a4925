"""Applies FSDP2 over all axes that shard rows or tokens: parameters, gradients and optimizer state are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from armillary.core import accumulation_dtype, compat, sum_gradients
from armillary.models.block import Block
from armillary.models.gpt import GPT
from armillary.models.llama import Llama

ZeroStage = Literal[1, 2, 3]

SHARDING = ("shard", "nodes", "devices", "ring", "ulysses")
"""Axes over which parameters are sharded, flattened into one."""


def shard_parameters(
    model: Llama | GPT, mesh: DeviceMesh, precision: torch.dtype, cpu_offload: bool = False, zero_stage: ZeroStage = 3
) -> None:
    """Applies FSDP2 in place: shards parameters over shard x ring x ulysses, and replicates over replicate (HSDP).

    Each block is a unit, which is gathered when it runs; so are embedding table and head, if they are not tied.
    Gradients are summed over all ranks, not averaged: divide the loss by the global number of labels.

    Args:
        mesh: a mesh with some of these axes, and possibly others, such as `build_mesh` returns.
        precision: dtype of forward and backward; gradients are reduced in float32 (float64 for float64).
        cpu_offload: keeps parameters, gradients and optimizer state in the host's memory.
        zero_stage: 3 frees a block's gathered parameters after its forward and gathers them again in backward; 2 keeps
            them in between. Gradients and optimizer state are sharded under both. 1 shards optimizer state alone: call
            `begin_micro_batch` before each micro-batch of a step; without the call it is 2.

    Raises:
        ValueError: the mesh has none of the axes.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=accumulation_dtype(precision))
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    fsdp_mesh = sharding_mesh(mesh)
    for module, keep in units(model):  # inner first: a unit takes the parameters that no unit has taken yet
        fully_shard(
            module,
            mesh=fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            reshard_after_forward=zero_stage == 3 and not keep,
        )
    sum_gradients(model)  # FSDP2 would average them


def begin_micro_batch(model: nn.Module, last: bool) -> None:
    """ZeRO stage 1: keeps gathered parameters and unsharded float32 gradients until the step's last micro-batch.

    Parameters are then gathered once a step, and gradients reduced once. Call it on every rank before each micro-batch
    of a model of `shard_parameters`.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)  # reduce-scatter only after the last micro-batch
    model.set_reshard_after_backward(last)  # keep parameters gathered until then
    model.set_is_last_backward(last)  # wait for these reductions at its end


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh for FSDP2: 1-D over the sharding axes, or 2-D [replicate, sharding] for HSDP."""
    flat_mesh = compat.flatten(mesh, sharding_axes(mesh), "fsdp")
    if "replicate" in (mesh.mesh_dim_names or ()) and mesh["replicate"].size() > 1:
        return compat.join(mesh["replicate"], flat_mesh)
    return flat_mesh


def sharding_axes(mesh: DeviceMesh) -> list[str]:
    """Returns the axes of the mesh over which parameters are sharded.

    Raises:
        ValueError: there are none.
    """
    names = mesh.mesh_dim_names or ()
    axes = [name for name in SHARDING if name in names]
    if not axes:
        available = ", ".join(names) or "no names"
        raise ValueError(f"parameters are sharded over any of {', '.join(SHARDING)}; the mesh has {available}")
    return axes


def units(model: Llama | GPT) -> Iterator[tuple[nn.Module, bool]]:
    """Yields FSDP units, inner modules first, each with a flag: stay gathered from forward to backward."""
    yield from ((module, False) for module in model.modules() if isinstance(module, Block))
    if isinstance(model, Llama) and model.lm_head is not None:
        yield model.model.embed_tokens, False
        yield model.lm_head, True  # its backward follows at once
    yield model, True  # the final norm, and tied weights, are used at the very end of forward
