"""AdamW, its parameter groups, and the learning rate of every step."""

from __future__ import annotations

from math import cos, pi

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


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of step `step` = 1..steps.

    The rate rises linearly to `config.lr` over `warmup_of` steps, and then follows the schedule: cosine, linear and wsd
    reach `config.min_lr` at step `steps`.
    """
    warmup = warmup_of(steps, config)
    if step <= warmup:
        return config.lr * step / warmup
    # The rate falls from the peak (fraction 1) to the minimum (0) over the steps after the warm-up.
    step, length = step - warmup, steps - warmup
    match config.schedule:
        case "cosine":
            fraction = (1 + cos(pi * step / length)) / 2
        case "linear":
            fraction = 1 - step / length
        case "wsd":
            decay = config.decay_steps or min(max(1, steps // 10), length)
            fraction = min(1.0, (length - step) / decay)
        case "constant":
            fraction = 1.0
    return config.min_lr + (config.lr - config.min_lr) * fraction


def warmup_of(steps: int, config: OptimizerConfig) -> int:
    """Returns the number of warm-up steps: as configured if the run has more steps, else half of the run's steps."""
    return config.warmup_steps if config.warmup_steps < steps else steps // 2


def schedule_notes(step: int, steps: int, config: OptimizerConfig) -> list[str]:
    """Returns lines to print if the warm-up is cut short, or the run resumes after `step`."""
    warmup, notes = warmup_of(steps, config), list[str]()
    if warmup != config.warmup_steps:
        notes.append(
            f"warm-up: {warmup} of {steps} steps; --optimizer.warmup-steps {config.warmup_steps} would not end before "
            "the run does"
        )
    if 0 < step < steps:
        rate = learning_rate(step + 1, steps, config)
        notes.append(f"learning rate of step {step + 1}: {rate:.2e}, on a schedule of {steps} steps in all")
    return notes
