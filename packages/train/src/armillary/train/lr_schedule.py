"""The learning rate of every step, in closed form: resuming from step n needs no state."""

from __future__ import annotations

from math import cos, pi

from armillary.train.config.sections import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of step `step` = 1..steps.

    The rate rises linearly to `config.lr` over `warmup_of` steps, and then follows the schedule: cosine, linear and wsd
    reach `config.min_lr` at step `steps`.
    """
    warmup = warmup_of(steps, config)
    if step <= warmup:
        return config.lr * step / warmup
    return config.min_lr + (config.lr - config.min_lr) * rate_fraction(step - warmup, steps - warmup, steps, config)


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


def rate_fraction(step: int, length: int, steps: int, config: OptimizerConfig) -> float:
    """Returns the rate as a fraction of the way from the minimum (0) to the peak (1).

    Args:
        step: step after the warm-up, 1..length.
        length: number of steps after the warm-up.
        steps: number of steps of the run.
    """
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
