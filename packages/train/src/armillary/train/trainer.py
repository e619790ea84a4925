"""The training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from armillary.data import Batch
from armillary.train.build import Run
from armillary.train.checkpoint import Checkpoints
from armillary.train.metrics import StepMetrics, Stopwatch, peak_flops, peak_memory
from armillary.train.report import Reporter
from armillary.train.step import StepResult, train_step
from armillary.train.stopping import BadSteps, StopSignal
from armillary.train.validation import validate


@dataclass
class Summary:
    """How a run ended. Losses are means over all tokens, of the steps since it was (re)started at `first_step`."""

    first_step: int = 1
    losses: list[float] = field(default_factory=list[float])
    validation: dict[str, float] = field(default_factory=dict[str, float])
    tokens: int = 0
    seconds: float = 0.0
    memory: int = 0
    checkpoint: Path | None = None

    @property
    def validation_loss(self) -> float:
        return self.validation.get("loss", float("nan"))

    def text(self, ranks: int) -> str:
        noun = "rank" if ranks == 1 else "ranks"
        if not self.losses:
            return f"nothing left to train: {self.checkpoint} is the last step"
        rate = self.tokens / self.seconds
        return "\n".join(
            [
                f"trained {len(self.losses)} steps, {self.tokens:,} tokens in {self.seconds:.0f} s on {ranks} {noun}",
                f"  loss         {self.losses[0]:.4f} -> {self.losses[-1]:.4f}",
                f"  validation   {self.validation_loss:.4f}",
                f"  tokens/s     {rate:,.0f} ({rate / ranks:,.0f} a rank)",
                f"  peak memory  {self.memory / 2**30:.2f} GiB a rank",
                f"  checkpoint   {self.checkpoint}",
            ]
        )


def train(run: Run) -> Summary:
    """Trains to the configured step, from the newest checkpoint if there is one. Every rank must call it."""
    config, steps = run.config, run.config.train.steps
    with Reporter(config) as report, StopSignal() as stop, Checkpoints(run, report.say) as saved:
        step = saved.restore()
        summary = Summary(first_step=step + 1)
        bad, watch = BadSteps(config.train, report.say), Stopwatch()
        while step < steps and not stop.asked(run.device):
            step += 1
            batches = [next(run.training) for _ in range(config.train.accumulation)]
            result = train_step(run, step, batches)
            bad.count(step, result, batches)
            summary.losses.append(result.loss)
            watch.count(run.tokens_per_step)
            report.step(measure(run, step, batches, result, watch.last_rate))
            with watch.paused():
                if step % config.validation.every == 0 or step == steps:
                    summary.validation = validate(run)
                    report.validated(step, summary.validation)
                if step % config.save.every == 0 and step < steps:
                    saved.start(step)
        summary.checkpoint = saved.finish(step)
        summary.tokens, summary.seconds, summary.memory = watch.tokens, watch.seconds, peak_memory(run.device)
        report.say(summary.text(dist.get_world_size()))
    return summary


def measure(run: Run, step: int, batches: list[Batch], result: StepResult, rate: float) -> StepMetrics:
    """What the step came to; `rate` in tokens/s over all ranks."""
    rate /= dist.get_world_size()
    mask = run.mask(batches[0])
    flops = run.model.config.flops_per_token(batches[0].layout.length, mask) * rate
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
    )
