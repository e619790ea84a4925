"""AdamW and its groups, and clipping over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from armillary.train.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW in one pass over all parameters of a kind; weight decay on matrices only."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    spared = set[int]() if config.decay_embeddings else tables
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in spared]
    kept = [p for p in model.parameters() if p.ndim <= 1 or id(p) in spared]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients down to a global norm of `limit`; returns the norm that they had, over all ranks."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = gradient_norm(gradients).to(gradients[0].dtype)
    clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of whole gradients of which each rank has a part: float64, with the same bits on every rank.

    Where bits differed, so would copies of a weight after a few steps. What several ranks have copies of counts once.
    """
    parts = defaultdict[int, list[Tensor]](list)
    for gradient in gradients:
        parts[copies_of(gradient)].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    total = torch.stack([get_total_norm(held).double().square() / copies for copies, held in parts.items()]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def copies_of(x: Tensor) -> int:
    """How many ranks hold what this rank holds of `x`."""
    ranks = dist.get_world_size()
    if not isinstance(x, DTensor):
        return ranks
    mesh = x.device_mesh
    copied = [mesh.size(i) for i, placement in enumerate(x.placements) if placement.is_replicate()]
    return prod(copied) * ranks // mesh.size()


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
