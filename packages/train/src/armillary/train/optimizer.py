"""AdamW and its groups, its learning rate by step, and clipping over all ranks."""

from __future__ import annotations

from math import cos, pi

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from armillary.train.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW; weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients down to a global norm of `limit`; returns the norm that they had, over all ranks."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step` = 1..steps: linear warm-up to the peak, then half a cosine down to the minimum."""
    warmup = min(config.warmup_steps, steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + cos(pi * progress)) / 2


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
