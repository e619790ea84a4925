"""The learning rate of every step, in closed form: whoever goes on from step n needs no state."""

from __future__ import annotations

from math import cos, pi

from armillary.train.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step` = 1..steps.

    A line up to the peak, reached at step `warmup_steps`, or the last one if that comes first; then the schedule, which
    ends at the minimum at the last step.
    """
    warmup = min(config.warmup_steps, steps)
    if step <= warmup:
        return config.lr * step / warmup
    return config.min_lr + (config.lr - config.min_lr) * height(step - warmup, steps - warmup, steps, config)


def height(step: int, left: int, steps: int, config: OptimizerConfig) -> float:
    """How far above the minimum the rate is, of 1, at step 1..left after the warm-up of a run of `steps`."""
    match config.schedule:
        case "cosine":
            return (1 + cos(pi * step / left)) / 2
        case "linear":
            return 1 - step / left
        case "wsd":
            decay = config.decay_steps or min(max(1, steps // 10), left)
            return min(1.0, (left - step) / decay)
        case "constant":
            return 1.0
