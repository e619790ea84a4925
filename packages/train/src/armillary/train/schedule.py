"""Learning rate by step: pure functions."""

from __future__ import annotations

from math import cos, pi

from armillary.train.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step` = 1..steps: linear warm-up to the peak, then half a cosine down to the minimum."""
    warmup = min(config.warmup_steps, steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / (steps - warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + cos(pi * progress)) / 2
