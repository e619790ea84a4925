"""The learning rate of every step, in closed form: resuming from step n needs no state."""

from __future__ import annotations

from math import cos, pi

from armillary.train.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step` = 1..steps.

    A line up to the peak, reached at the end of the `warmup_of` the run; then the schedule, which ends at the minimum
    at the last step.
    """
    warmup = warmup_of(steps, config)
    if step <= warmup:
        return config.lr * step / warmup
    return config.min_lr + (config.lr - config.min_lr) * height(step - warmup, steps - warmup, steps, config)


def warmup_of(steps: int, config: OptimizerConfig) -> int:
    """Steps of the warm-up: as configured, or half of the run where it would not be over before the run is."""
    return config.warmup_steps if config.warmup_steps < steps else steps // 2


def schedule_notes(step: int, steps: int, config: OptimizerConfig) -> list[str]:
    """Lines to print for a run of `steps` that starts or resumes after `step`: a shorter warm-up, the resumed rate."""
    warmup, said = warmup_of(steps, config), list[str]()
    if warmup != config.warmup_steps:
        said.append(
            f"warm-up: {warmup} of {steps} steps; --optimizer.warmup-steps {config.warmup_steps} would not end before "
            "the run does"
        )
    if 0 < step < steps:
        rate = learning_rate(step + 1, steps, config)
        said.append(f"learning rate of step {step + 1}: {rate:.2e}, on a schedule of {steps} steps in all")
    return said


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
