"""The training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from armillary.data import Batch
from armillary.train.bad_steps import BadSteps
from armillary.train.checkpoint import Checkpoints
from armillary.train.config import Config
from armillary.train.lr_schedule import schedule_notes
from armillary.train.reporting.metrics import StepMetrics
from armillary.train.reporting.report import Reporter
from armillary.train.run import Run
from armillary.train.runtime.health.output_lock import OutputLock
from armillary.train.runtime.health.stopping import StopSignal
from armillary.train.runtime.health.watchdog import Watchdog
from armillary.train.runtime.peak import peak_flops, peak_memory
from armillary.train.runtime.profiler import Profiler
from armillary.train.runtime.step_trace import StepTrace
from armillary.train.runtime.stopwatch import Stopwatch
from armillary.train.step import StepResult, train_step
from armillary.train.validation import validate


@dataclass
class Summary:
    """How a run ended. Losses are means over all tokens, of the steps since it was (re)started at `first_step`.

    `seconds` are those of steps alone, `elapsed` all since the first began. `picture` is set on rank 0 alone.
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


def watchdog_of(config: Config) -> Watchdog:
    """The watchdog of a run: its limit, the flag that sets it, and the folder for its reports."""
    minutes = config.train.timeout_minutes
    flag = f"--train.timeout-minutes {minutes:g}"
    return Watchdog(60 * minutes, flag, config.train.output / "hang", "armillary-train")


def train(run: Run, stop: StopSignal | None = None, watchdog: Watchdog | None = None) -> Summary:
    """Trains to the configured step, from the newest checkpoint if there is one. Every rank must call it.

    Args:
        stop: a signal handler that is installed already; by default one is installed here.
        watchdog: is notified of every phase; by default none is started, and a hang ends by its group's timeout.
    """
    config, steps = run.config, run.config.train.steps
    watchdog = watchdog or watchdog_of(config)
    with (
        OutputLock(config.train.output, partial(print, flush=True), flag="--train.output") as lock,
        Reporter(config, lock.fence) as report,
        watchdog.reporting(),  # before the reporter waits for its sinks
        stop or StopSignal() as stop,
        Checkpoints(run, lock, report.say, report.event) as saved,
        watchdog.reporting(),  # before checkpoints wait for the save in flight, and so for ranks that may be gone
    ):
        watchdog.start_phase("restoring", 0)
        step = saved.restore()
        report.resumed(step)
        for line in schedule_notes(step, steps, config.optimizer):
            report.say(line)
        log, folder = config.log, config.train.output / "profile"
        profiler = Profiler(log.profile, log.memory_snapshot, folder, report.say)
        traced = StepTrace(log.trace, log.trace_steps, run.device, step + 1, steps, report.say)
        summary = Summary(first_step=step + 1)
        bad, watch = BadSteps(config.train, run.training, report.say), Stopwatch()
        while step < steps and not stop.asked(run.device):
            step += 1
            lock.check()
            watchdog.start_phase("training", step)
            with profiler.step(step), traced.step(step):
                batches = [next(run.training) for _ in range(config.train.accumulation)]
                result = train_step(run, step, batches)
                watch.count(run.tokens_per_step)
            bad.count(step, result, batches)
            summary.losses.append(result.loss)
            report.step(measure(run, step, batches, result, watch.last_seconds, saved.tokens(step)))
            with watch.paused():
                if step % config.validation.every == 0 or step == steps:
                    watchdog.start_phase("validating", step)
                    summary.validation = validate(run)
                    report.validated(step, summary.validation)
                if step % config.save.every == 0 and step < steps and result.good:
                    watchdog.start_phase("saving", step)
                    saved.start(step)
        traced.finish()
        watchdog.start_phase("saving", step)
        # There is nothing to save before the first step. After a bad one, what led to it may be in the weights.
        summary.checkpoint = saved.finish(step, prune=not bad.in_a_row) if step else None
        summary.tokens, summary.seconds, summary.memory = watch.tokens, watch.seconds, peak_memory(run.device)
        summary.elapsed, summary.picture = watch.elapsed(), report.finished(step)
        if summary.losses or step >= steps:
            report.say(summary.text(dist.get_world_size()))
        if step < steps:
            report.say(f"stopped by a signal after step {step} of {steps}; the same command resumes")
    return summary


def measure(run: Run, step: int, batches: list[Batch], result: StepResult, seconds: float, tokens: int) -> StepMetrics:
    """Metrics of a step that took `seconds`, after which the run has seen `tokens`."""
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
