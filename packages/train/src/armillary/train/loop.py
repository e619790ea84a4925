"""A run: built, resumed from its newest checkpoint, trained step by step, validated, saved, and summed up.

`train_loop` is the table of contents. Below it are its rows that are no chapters of their own: validation, and steps
whose loss is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.data import Batch, Batches
from armillary.data.console import print_lines
from armillary.train.build import prepare, process_group
from armillary.train.checkpoint import Checkpoints
from armillary.train.config.sections import Config
from armillary.train.device import peak_memory
from armillary.train.lock import OutputLock
from armillary.train.logs import Reporter
from armillary.train.metrics import Stopwatch, Summary, measure
from armillary.train.optimizer import schedule_notes
from armillary.train.profiler import Profiler, StepTrace
from armillary.train.step import Run, StepResult, forward, sum_over_ranks, train_step
from armillary.train.stop_signal import StopSignal
from armillary.train.verification import Verification
from armillary.train.watchdog import Watchdog


def train(config: Config, watchdog: Watchdog | None = None, notes: Sequence[str] = ()) -> Summary:
    """Trains as `armillary-train` does with this configuration, from the newest checkpoint if there is one.

    Every rank must call it. If there is no default process group, it starts one (from torchrun's environment, or with
    a single rank), and destroys it at the end, but not after an error.

    Args:
        watchdog: ends the process if a phase takes too long; by default `watchdog_of(config)`.
        notes: lines that rank 0 prints before the first step.

    Raises:
        ValueError: the configuration is invalid, it or the data differ between ranks, or a token store is damaged.
        FloatingPointError: a loss or gradient is not finite, on every rank (`--train.bad-step`).
        OSError: the last checkpoint cannot be saved or exported; on every rank.
        TimeoutError, ConnectionError: a rank is missing.
        RuntimeError: communication failed, another run has taken the output folder, or a fact that
            `--check.verify-every` verifies is wrong; on every rank, before the update.
    """
    watchdog = watchdog or watchdog_of(config)
    # A signal that arrives before `StopSignal` ends the process, which has no state to save yet.
    with process_group(config) as device, StopSignal() as stop, watchdog:
        run = prepare(config, device)
        if notes and dist.get_rank() == 0:
            print_lines(*notes)
        return train_loop(run, stop, watchdog)


def watchdog_of(config: Config) -> Watchdog:
    """Returns the watchdog of a run: a step may take `timeout_minutes`, and stacks are written to OUTPUT/hang."""
    minutes = config.train.timeout_minutes
    flag = f"--train.timeout-minutes {minutes:g}"
    return Watchdog(60 * minutes, flag, config.train.output / "hang", "armillary-train")


def train_loop(run: Run, stop: StopSignal | None = None, watchdog: Watchdog | None = None) -> Summary:
    """Trains a prepared run to the configured step. Every rank must call it.

    Args:
        stop: a signal handler that is installed already; by default one is installed here.
        watchdog: a watchdog in whose `with` block this runs; without one, a hang ends when a collective times out.
    """
    config, steps = run.config, run.config.train.steps
    watchdog = watchdog or watchdog_of(config)
    # An error leaves these blocks from the last to the first. The exits of `reporter` and `checkpoints` may wait, for a
    # sink or for missing ranks. A `watchdog.reporting()` inside each of them tells the other ranks of the error first.
    with (
        OutputLock(config.train.output, print_lines, flag="--train.output") as lock,
        Reporter(config, lock.fence) as reporter,
        watchdog.reporting(),  # before the reporter's exit waits for its sinks
        nullcontext(stop) if stop else StopSignal() as stop,
        Checkpoints(run, lock, reporter.say, reporter.event) as checkpoints,
        watchdog.reporting(),  # before the exit of `checkpoints` waits for the save in flight
    ):
        # 1. Resume from the newest intact checkpoint, if there is one.
        watchdog.start_phase("restoring", 0)
        step = checkpoints.restore()
        reporter.on_resume(step)
        for line in schedule_notes(step, steps, config.optimizer):
            reporter.say(line)
        log, folder = config.log, config.train.output / "profile"
        profiler = Profiler(log.profile, log.memory_snapshot, folder, reporter.say)
        step_trace = StepTrace(log.trace, log.trace_steps, run.device, step + 1, steps, reporter.say)
        summary = Summary(first_step=step + 1)
        bad_steps, stopwatch, verification = BadSteps(run, reporter.say), Stopwatch(), Verification(run)
        # 2. Train. All ranks stop after the same step, even if the signal reaches only one of them.
        while step < steps and not stop.is_requested(run.device):
            step += 1
            lock.check()  # raises before another step if a newer run has taken the folder
            watchdog.start_phase("training", step)
            # One global batch, in micro-batches: loss, gradients, optimizer.
            with profiler.step(step), step_trace.step(step):
                batches = [next(run.training) for _ in range(config.train.accumulation)]
                result = train_step(run, step, batches, verification.of(step, batches))
                stopwatch.count(run.tokens_per_step)
            # Raises for a non-finite loss or gradient, or counts a skipped update (`--train.bad-step`).
            bad_steps.count(step, result, batches)
            if verification.report is not None:
                reporter.event("verified", step, str(verification.report))
                reporter.say(f"step {step} is verified:\n{verification.report}")
            summary.losses.append(result.loss)
            reporter.step(measure(run, step, batches, result, stopwatch.last_seconds, checkpoints.tokens(step)))
            with stopwatch.pause():  # validation and saving do not count as step time
                # Every `validation.every` steps and at the end: the loss on held-out rows.
                if step % config.validation.every == 0 or step == steps:
                    watchdog.start_phase("validating", step)
                    summary.validation = validate(run)
                    reporter.on_validation(step, summary.validation)
                # Every `save.every` steps, except bad ones and the last: a checkpoint, which a thread writes meanwhile.
                if step % config.save.every == 0 and step < steps and result.good:
                    watchdog.start_phase("saving", step)
                    checkpoints.start(step)
        # 3. Save the last step and sum up the run. There is nothing to save before the first step.
        step_trace.finish()
        watchdog.start_phase("saving", step)
        # The weights may be the cause of a bad step, so if the last steps were bad, no older checkpoint is removed.
        summary.checkpoint = checkpoints.finish(step, prune=not bad_steps.in_a_row) if step else None
        summary.tokens, summary.seconds, summary.memory = stopwatch.tokens, stopwatch.seconds, peak_memory(run.device)
        summary.elapsed, summary.picture = stopwatch.elapsed(), reporter.finish(step)
        if summary.losses or step >= steps:
            reporter.say(summary.text(dist.get_world_size()))
        if step < steps:
            reporter.say(f"stopped by a signal after step {step} of {steps}; the same command resumes")
    return summary


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Returns "loss", the mean over all labelled tokens of the first held-out rows.

    These rows are the same at every call, accumulation and mesh.
    """
    return {"loss": mean_over_rows(run, run.validation, partial(forward, run))}


def mean_over_rows(run: Run, rows: Batches, evaluate: Callable[[Batch], tuple[Tensor, Tensor]]) -> float:
    """Returns the mean of `evaluate`, (total, count) of a rank's micro-batch, over the held-out global batches."""
    micro_batches = range(run.config.validation.batches * run.config.train.accumulation)
    # Sums stay on the device until the end, so that the host queues the next micro-batch meanwhile.
    sums = [torch.stack([x.double() for x in evaluate(rows.batch(i))]) for i in micro_batches]
    total, count = sum_over_ranks(run, torch.stack(sums).sum(0)).tolist()
    return total / (count or 1.0)  # rows of padding have no labels


class BadSteps:
    """Counts consecutive bad steps: steps whose loss or gradient norm is not finite, and whose update was skipped.

    `count` raises FloatingPointError on every rank, with the rows, after a bad step if `train.bad_step` is "stop", or
    after `train.bad_steps` of them in a row.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self.run, self.say, self.in_a_row = run, say, 0

    def count(self, step: int, result: StepResult, batches: list[Batch]) -> None:
        if result.good:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        cause = describe_bad_rows(self.run, batches)
        message = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; {cause}"
        config = self.run.config.train
        if config.bad_step == "stop" or self.in_a_row >= config.bad_steps:
            repetition = "" if self.in_a_row == 1 else f", as for {self.in_a_row} steps in a row"
            raise FloatingPointError(f"{message}{repetition}")
        self.say(f"{message}; skipped, weights unchanged")


def describe_bad_rows(run: Run, batches: list[Batch]) -> str:
    by_rank, rows = bad_rows(run, batches), run.training
    bad_row_numbers = sorted({row for of_rank in by_rank.values() for row in of_rank})
    if not bad_row_numbers:
        end = rows.state_dict()["rows"]
        return f"losses are finite on every rank, in rows {end - len(batches) * rows.rows_per_step}..{end - 1}"
    ranks = ", ".join(map(str, sorted(by_rank)))
    row_texts = "; ".join(f"row {row} ({rows.describe(row)})" for row in bad_row_numbers[:4])
    suffix = f"; and {len(bad_row_numbers) - 4} more rows" if len(bad_row_numbers) > 4 else ""
    return f"no finite loss on rank{'s' * (len(by_rank) > 1)} {ranks} in {row_texts}{suffix}"


@torch.no_grad()
def bad_rows(run: Run, batches: list[Batch]) -> dict[int, list[int]]:
    """Returns the rows whose loss is not finite, by rank. Every rank must call it."""
    # Forward again, on one row at a time, with the weights of the bad step, which the skipped update left unchanged.
    single_rows = [batch.of_row(i) for batch in batches for i in range(len(batch.rows))]
    own_rows = [batch.rows.start for batch in single_rows if not forward(run, batch)[0].isfinite()]
    rows_by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows_by_rank, own_rows)
    return {rank: rows for rank, rows in enumerate(rows_by_rank) if rows}
