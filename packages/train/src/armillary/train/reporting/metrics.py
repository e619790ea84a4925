"""Metrics of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, over all ranks.

    Units: learning rate as is, tokens/s of each device, TFLOP/s of each device, memory in bytes; `seconds` of the step
    alone, `tokens` since the run's first step, over all ranks.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    memory: int
    tokens_per_second: float
    tflops: float
    utilisation: float | None
    seconds: float = 0.0
    tokens: int = 0

    def line(self) -> str:
        mfu = "-" if self.utilisation is None else f"{self.utilisation:.1%}"
        return (
            f"step: {self.step} loss: {self.loss:.4f} grad_norm: {self.grad_norm:.4f} lr: {self.learning_rate:.2e} "
            f"memory: {self.memory / 2**30:.2f}GiB tps: {self.tokens_per_second:,.0f} "
            f"tflops: {self.tflops:.4g} mfu: {mfu}"
        )


def averaged(steps: Sequence[StepMetrics]) -> StepMetrics:
    """The last of these steps, with rates averaged over all of them."""
    last, seconds = steps[-1], sum(step.seconds for step in steps)

    def mean(rates: Sequence[float]) -> float:
        return sum(rate * step.seconds for rate, step in zip(rates, steps, strict=True)) / seconds

    if not seconds:
        return last
    return replace(
        last,
        tokens_per_second=mean([step.tokens_per_second for step in steps]),
        tflops=mean([step.tflops for step in steps]),
        utilisation=None if last.utilisation is None else mean([step.utilisation or 0.0 for step in steps]),
    )
