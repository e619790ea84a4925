"""Putting a plain model onto a mesh, from outside the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import isqrt

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from armillary.attention import Method
from armillary.core import compat
from armillary.models import GPT, Llama
from armillary.models.block import Block
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
    given = config.replicate * config.shard * (config.ring or 1) * (config.ulysses or 1)
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
    }


def check_heads(attention: Method, heads: int, kv_heads: int, head_dim: int) -> None:
    """Asks the method whether it can split these heads, before anything is built.

    Raises:
        ValueError: it cannot.
    """
    q, k = (torch.empty(1, 1, n, head_dim, device="meta") for n in (heads, kv_heads))
    attention.check(q, k, k)


def shard_model(model: Llama | GPT, mesh: DeviceMesh, precision: torch.dtype, on_host: bool = False) -> None:
    """Applies FSDP2 in place: parameters sharded over shard x ring x ulysses flattened, copied over replicate.

    Each block is gathered when it runs, and so are the embedding table and the head where they are two. Gradients are
    summed over all ranks, not averaged: the loss is already divided by the global token count.

    Args:
        precision: of forward and backward; gradients are reduced in float32.
        on_host: parameters and gradients stay in the host's memory, and so does what the optimizer keeps of them.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    sharding = compat.flatten(mesh, ("shard", "ring", "ulysses"), "fsdp")
    if mesh["replicate"].size() > 1:
        sharding = compat.join(mesh["replicate"], sharding)
    for module, keep in units(model):
        fully_shard(module, mesh=sharding, mp_policy=policy, offload_policy=place, reshard_after_forward=not keep)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def units(model: Llama | GPT) -> Iterator[tuple[nn.Module, bool]]:
    """Modules whose parameters are gathered together, inner ones first; and whether they stay until after backward."""
    yield from ((module, False) for module in model.modules() if isinstance(module, Block))
    if isinstance(model, Llama) and model.lm_head is not None:
        yield model.model.embed_tokens, False
        yield model.lm_head, True  # its backward follows at once
    yield model, True


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of all ranks that hold tokens of one step."""
    return compat.flatten(mesh, DATA_AXES, "data")
