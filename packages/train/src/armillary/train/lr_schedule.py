"""The learning rate of every step, in closed form: resuming from step n needs no state."""

from __future__ import annotations

from math import cos, pi

from armillary.train.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of step `step` = 1..steps.

    A linear warm-up reaches the peak after `warmup_of` steps; the schedule then reaches the minimum at the last step.
    """
    warmup = warmup_of(steps, config)
    if step <= warmup:
        return config.lr * step / warmup
    return config.min_lr + (config.lr - config.min_lr) * rate_fraction(step - warmup, steps - warmup, steps, config)


def warmup_of(steps: int, config: OptimizerConfig) -> int:
    """Returns the steps of the warm-up: the configured number if it is below the run's steps, else half of these."""
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


def rate_fraction(step: int, length: int, steps: int, config: OptimizerConfig) -> float:
    """Returns the rate as a fraction from minimum (0) to peak (1), at step 1..length after the warm-up of `steps`."""
    match config.schedule:
        case "cosine":
            return (1 + cos(pi * step / length)) / 2
        case "linear":
            return 1 - step / length
        case "wsd":
            decay = config.decay_steps or min(max(1, steps // 10), length)
            return min(1.0, (length - step) / decay)
        case "constant":
            return 1.0
