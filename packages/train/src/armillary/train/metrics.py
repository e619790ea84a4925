"""Metrics of a step, the stopwatch that times it, and the summary of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from armillary.data import Batch
from armillary.train.device import peak_flops, peak_memory
from armillary.train.step import Run, StepResult


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
        # A format like torchtitan's. A CPU has no peak to compare with, and its FLOP/s say nothing about a GPU's.
        share_of_peak = (
            "" if self.utilisation is None else f" tflops/rank: {self.tflops:.4g} mfu: {self.utilisation:.1%}"
        )
        return (
            f"step: {self.step} loss: {self.loss:.4f} grad_norm: {self.grad_norm:.4f} lr: {self.learning_rate:.2e} "
            f"memory: {self.memory / 2**30:.2f}GiB tps/rank: {self.tokens_per_second:,.0f}{share_of_peak}"
        )


def average(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Returns the metrics of the last step, with rates averaged over the time of all these steps."""
    last, seconds = steps[-1], sum(step.seconds for step in steps)

    def mean(rates: Sequence[float]) -> float:
        return sum(rate * step.seconds for rate, step in zip(rates, steps, strict=True)) / seconds

    if not seconds:
        return last
    # Rates are weighted by the time of their steps: their mean is that of the tokens over the whole time.
    return replace(
        last,
        tokens_per_second=mean([step.tokens_per_second for step in steps]),
        tflops=mean([step.tflops for step in steps]),
        utilisation=None if last.utilisation is None else mean([step.utilisation or 0.0 for step in steps]),
    )


def measure(run: Run, step: int, batches: list[Batch], result: StepResult, seconds: float, tokens: int) -> StepMetrics:
    """Returns the metrics of a step; `tokens` were trained on through it, over all ranks and restarts."""
    rate = run.tokens_per_step / seconds / dist.get_world_size()
    # Attention's work depends on the documents of a row, so each rank counts its own rows.
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


class Stopwatch:
    """Counts the tokens and seconds of all steps, and the seconds of the last step, without pauses."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.tokens, self.seconds, self.last_seconds = 0, 0.0, 0.0
        self.started = self.running_since = self.clock()

    def count(self, tokens: int) -> None:
        now = self.clock()
        self.last_seconds, self.running_since = now - self.running_since, now
        self.seconds, self.tokens = self.seconds + self.last_seconds, self.tokens + tokens

    @contextmanager
    def pause(self) -> Generator[None]:
        """Context manager around work that does not count as part of a step."""
        yield
        self.running_since = self.clock()

    def elapsed(self) -> float:
        return self.clock() - self.started


@dataclass
class Summary:
    """The result of a run, since its start or restart.

    Args:
        first_step: the first step after the start or restart.
        losses: loss of each step from `first_step` on, over all ranks.
        validation: results of the last validation: "loss", the mean over all labels.
        tokens: tokens of these steps, over all ranks.
        seconds: duration of these steps, without validation and saving.
        elapsed: seconds since training began, with validation and saving.
        memory: peak memory of this rank in bytes.
        checkpoint: path of the last checkpoint; None if nothing was saved.
        picture: path of the plot, on rank 0 if one was drawn.
    """

    first_step: int = 1
    losses: list[float] = field(default_factory=list[float])
    validation: dict[str, float] = field(default_factory=dict[str, float])
    tokens: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    memory: int = 0
    checkpoint: Path | None = None
    picture: Path | None = None

    @property
    def validation_loss(self) -> float:
        return self.validation.get("loss", float("nan"))

    def text(self, ranks: int) -> str:
        noun = "rank" if ranks == 1 else "ranks"
        if not self.losses:
            return f"nothing left to train: {self.checkpoint} is the last step"
        rate, overhead = self.tokens / self.seconds, self.elapsed - self.seconds
        lines = [
            f"trained {len(self.losses)} steps, {self.tokens:,} tokens in {self.seconds:.0f} s on {ranks} {noun}",
            f"  loss         {self.losses[0]:.4f} -> {self.losses[-1]:.4f}",
            f"  validation   {self.validation_loss:.4f}",
            f"  tokens/s     {rate:,.0f} ({rate / ranks:,.0f} a rank)",
            f"  overhead     {overhead:.0f} s outside of steps: validation, saving, traces",
            f"  peak memory  {self.memory / 2**30:.2f} GiB a rank",
        ]
        lines += [f"  loss curve   {self.picture}"] if self.picture else []
        return "\n".join([*lines, f"  checkpoint   {self.checkpoint}"])
