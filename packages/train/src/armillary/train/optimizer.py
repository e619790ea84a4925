"""AdamW and its parameter groups."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW

from armillary.train.config.sections import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """Returns fused AdamW, with weight decay on matrices only (`decay_embeddings`: embedding tables too)."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    exempt = set[int]() if config.decay_embeddings else tables
    with_decay = [p for p in model.parameters() if p.ndim > 1 and id(p) not in exempt]
    # Norms and biases, which are vectors, have no weight decay.
    without_decay = [p for p in model.parameters() if p.ndim <= 1 or id(p) in exempt]
    groups = [
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
