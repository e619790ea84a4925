"""Metrics of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from armillary.data import Batch
from armillary.train.run import Run
from armillary.train.runtime.peak import peak_flops, peak_memory
from armillary.train.step import StepResult


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step.

    Args:
        loss: mean loss of the step's labelled tokens over all ranks, in nats.
        grad_norm: norm of all gradients over all ranks, before clipping.
        memory: peak memory of this rank since its start, in bytes.
        tokens_per_second: tokens of the step per second and rank.
        tflops: 10^12 floating-point operations of the model per second and rank, counted from this replica's rows.
        utilisation: MFU, a fraction; None if the device's peak is unknown.
        seconds: duration of the step, without validation and saving.
        tokens: tokens trained on since the run's first step, over all ranks and restarts.
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
        """Returns the log line, in a format like torchtitan's."""
        mfu = "-" if self.utilisation is None else f"{self.utilisation:.1%}"
        return (
            f"step: {self.step} loss: {self.loss:.4f} grad_norm: {self.grad_norm:.4f} lr: {self.learning_rate:.2e} "
            f"memory: {self.memory / 2**30:.2f}GiB tps: {self.tokens_per_second:,.0f} "
            f"tflops: {self.tflops:.4g} mfu: {mfu}"
        )


def average(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Returns the metrics of the last step, with rates averaged over the time of all these steps."""
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


def measure(run: Run, step: int, batches: list[Batch], result: StepResult, seconds: float, tokens: int) -> StepMetrics:
    """Returns the metrics of a step.

    Args:
        batches: this rank's micro-batches of the step.
        seconds: duration of the step.
        tokens: tokens trained on through this step, over all ranks and restarts.
    """
    rate = run.tokens_per_step / seconds / dist.get_world_size()
    per_token = [run.model.config.flops_per_token(batch.layout.length, run.mask(batch)) for batch in batches]
    flops = rate * sum(per_token) / len(per_token)
    peak = peak_flops(run.device)
    return StepMetrics(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=run.optimizer.param_groups[0]["lr"],
        memory=peak_memory(run.device),
        tokens_per_second=rate,
        tflops=flops / 1e12,
        utilisation=None if peak is None else flops / peak,
        seconds=seconds,
        tokens=tokens,
    )
