"""Gradients over all ranks: `sum_gradients` sums them instead of averaging, `clip_gradients` clips their norm."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from armillary.core import compat


def sum_gradients(model: nn.Module) -> None:
    """Makes FSDP2 or DDP sum gradients over ranks instead of averaging them.

    For losses that are a sum over the rank's tokens, divided by the number of tokens on all ranks: an average over R
    ranks would be 1/R of the gradient of the global loss.

    Call it once on every rank, after `fully_shard` of every module (or after wrapping in DDP). The mesh passed to
    `fully_shard` must contain all axes over which tokens are sharded, the sequence and head axes too.

    Raises:
        ValueError: `model` is not a module, none of its modules is under FSDP2, a trainable parameter is not, a module
            is under FSDP1, or the model is a DDP model that already has a communication hook.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"{type(model).__name__} is not a model: pass the nn.Module with the parameters")
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # takes seconds to import

    # DDP divides by the number of ranks unless it has a communication hook. So a hook that only all-reduces sums.
    if isinstance(model, DistributedDataParallel):
        try:
            model.register_comm_hook(model.process_group, _all_reduce)
        except RuntimeError as error:
            message = f"this DDP model already has a communication hook, which does the reduction: {error}"
            raise ValueError(message) from error
        return
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("FullyShardedDataParallel (FSDP1) cannot sum gradients: use fully_shard (FSDP2), or DDP")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    outside = parameters_outside_fsdp(model.named_parameters())
    if not sharded or outside:
        subject = f"{outside[0]} is not" if sharded else f"no module of {type(model).__name__} is"
        raise ValueError(
            f"{subject} under FSDP2, so that nothing would sum gradients over ranks: call fully_shard on the whole "
            "model first, wrap it in DistributedDataParallel, or after each backward do dist.all_reduce(p.grad) for "
            "all parameters"
        )
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average, and NCCL then needs no scaling


def parameters_outside_fsdp(named_parameters: Iterable[tuple[str, Tensor]], ranks: Collection[int] = ()) -> list[str]:
    """Returns the names of trainable parameters whose gradients FSDP2 does not reduce.

    A DTensor that is not under FSDP2 counts only if its mesh lacks some of `ranks`, because another parallelism may
    reduce its gradient over the ranks of its mesh.
    """
    forms = set[int]().union(*(p.forms for p in compat.fsdp_parameters()))
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad and id(p) not in forms]
    return [name for name, p in trainable if not (compat.is_dtensor(p) and mesh_ranks(p.device_mesh).issuperset(ranks))]


def mesh_ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients down, in place, to a global norm of at most `limit`. Every rank must call it.

    Parameters may be local tensors, the same on every rank, and DTensors on one mesh or on several.

    Returns:
        The norm of all gradients over all ranks before scaling, a tensor without dims in the first gradient's dtype.

    Raises:
        ValueError: no parameter has a gradient.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise ValueError(f"no parameter of {type(model).__name__} has a gradient; gradients are clipped after backward")
    norm = gradient_norm(gradients).to(gradients[0].dtype)
    # Each rank scales local tensors, those of `Partial` DTensors too: in-place ops on these are wrong in torch 2.11.
    on_device = defaultdict[torch.device, list[Tensor]](list)
    for gradient in gradients:
        on_device[gradient.device].append(compat.local_part(gradient))
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # the epsilon of torch.nn.utils.clip_grad_norm_
    for device, tensors in on_device.items():
        compat.scale(tensors, factor.to(device))
    return norm


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Returns the norm of gradients over all ranks as a float64 tensor, with the same bits on every rank."""
    # With different bits, the copies of a weight on several ranks would differ after a few steps. A gradient that
    # several ranks have counts once. The norms of single shards are computed in the gradients' dtype.
    shards = defaultdict[int, list[Tensor]](list)  # by their number of copies
    for shard, copies in map(_shard_and_copies, gradients):
        shards[copies].append(shard)
    # The all-reduce adds a shard with copies on c ranks c times, so each of these ranks gives 1 / c of its square.
    total = torch.stack([get_total_norm(group).double().square() / copies for copies, group in shards.items()]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def _shard_and_copies(x: Tensor) -> tuple[Tensor, int]:
    """Returns this rank's shard of a gradient, and the number of ranks that have the same shard."""
    # Partial sums are all-reduced first, because the norm of a sum does not follow from the norms of its addends.
    if not compat.is_dtensor(x):
        return x, dist.get_world_size()
    if any(placement.is_partial() for placement in x.placements):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if placement.is_partial() else placement for placement in x.placements]
        x = x.redistribute(placements=placements)
    mesh = x.device_mesh
    replicas = [mesh.size(i) for i, placement in enumerate(x.placements) if placement.is_replicate()]
    return x.to_local(), prod(replicas) * dist.get_world_size() // mesh.size()


def _all_reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP inspects this function's annotations, which must not be strings: no `from __future__ import annotations` here.
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
