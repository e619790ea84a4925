"""Gradients over ranks: summed, as losses divided by the global count of tokens want them, and clipped by one norm."""

from collections import defaultdict
from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from armillary.core import compat


def sum_gradients(model: nn.Module) -> None:
    """Has FSDP2 (or DDP) sum gradients over ranks, where by itself it averages them.

    Each rank's loss is the sum over its own tokens divided by the count of all ranks' tokens: a share of the loss,
    whose gradient is a share of the gradient. Averaged over N ranks it would be 1/N of it. Call it once, after
    `fully_shard` on every module (or after wrapping in DDP), on every rank. The mesh given to `fully_shard` must hold
    all axes over which tokens are spread, the sequence's and the head axis too, as one dim, or as two for HSDP.

    Raises:
        ValueError: no module is under FSDP2, or a parameter that learns is under none; FSDP1; a DDP model that has a
            communication hook already.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"{type(model).__name__} is no model: give the nn.Module that has its parameters")
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # takes seconds, and not all need it

    if isinstance(model, DistributedDataParallel):
        _sum_in_ddp(model)
        return
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("FullyShardedDataParallel (FSDP1) cannot sum gradients: use fully_shard (FSDP2), or DDP")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    outside = [name for name, p in model.named_parameters() if p.requires_grad and not compat.is_dtensor(p)]
    if not sharded or outside:
        what = f"{outside[0]} is not" if sharded else f"no module of {type(model).__name__} is"
        raise ValueError(
            f"{what} under FSDP2, so that nothing would sum gradients over ranks: call fully_shard on the whole model "
            "first, wrap it in DistributedDataParallel, or after each backward do dist.all_reduce(p.grad) for all "
            "parameters"
        )
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other, and NCCL needs no scaling


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients down to a global norm of `limit`; returns the norm that they had, over all ranks.

    Parameters may be local tensors and DTensors, on one mesh or on several.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = gradient_norm(gradients).to(gradients[0].dtype)
    # Each rank scales what it holds, shares of sums too: torch 2.11 is wrong in place on a DTensor that is `Partial`.
    on_device = defaultdict[torch.device, list[Tensor]](list)
    for gradient in gradients:
        on_device[gradient.device].append(_local(gradient))
    for device, parts in on_device.items():
        compat.scale(parts, (limit / (norm + 1e-6)).clamp(max=1.0).to(device))  # torch adds as much to the norm
    return norm


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of whole gradients of which each rank has a part: float64, with the same bits on every rank.

    Where bits differed, so would copies of a weight after a few steps. What several ranks have copies of counts once.
    """
    parts = defaultdict[int, list[Tensor]](list)
    for held, copies in map(_held, gradients):
        parts[copies].append(held)
    total = torch.stack([get_total_norm(held).double().square() / copies for copies, held in parts.items()]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def _held(x: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a gradient, and how many ranks hold that.

    Without sums that are pending: the norm of a sum does not follow from those of the shares.
    """
    if not compat.is_dtensor(x):
        return x, dist.get_world_size()
    if any(placement.is_partial() for placement in x.placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if placement.is_partial() else placement for placement in x.placements]
        x = x.redistribute(placements=whole)
    mesh = x.device_mesh
    copied = [mesh.size(i) for i, placement in enumerate(x.placements) if placement.is_replicate()]
    return x.to_local(), prod(copied) * dist.get_world_size() // mesh.size()


def _local(x: Tensor) -> Tensor:
    """What this rank holds of it, in the same memory."""
    return x.to_local() if compat.is_dtensor(x) else x


def _sum_in_ddp(model: DistributedDataParallel) -> None:
    try:
        model.register_comm_hook(model.process_group, _all_reduce)
    except RuntimeError as error:
        raise ValueError(f"this DDP model has a communication hook already, which decides: {error}") from error


def _all_reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Where there is a hook, DDP divides nothing. It reads the annotations, which may not be text."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
