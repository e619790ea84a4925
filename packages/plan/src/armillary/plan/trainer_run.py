"""`armillary-plan run`: predicts memory and time of a step, from the trainer's own flags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from armillary.data.console import Bar, print_table
from armillary.models import GPTConfig, LlamaConfig
from armillary.plan.arguments import cluster_of, duration
from armillary.plan.cluster import Cluster
from armillary.plan.memory import AttentionChoice, Job, StepMemory, simulate
from armillary.plan.memory.cli import COLUMNS, fullness, memory_rows
from armillary.plan.memory.room import FORMULAS, Room, advice, check_simulated
from armillary.plan.memory.simulate import Progress
from armillary.plan.memory.tensor_sizes import FLOAT32_BYTES
from armillary.plan.time.passes import passes_of
from armillary.plan.time.step_time import StepTime, step_time
from armillary.train import Config
from armillary.train.config import ConfiguredRun, read_run
from armillary.train.internal import DryRun, dry_run, precision_of, print_dry_run, sm_margin


@dataclass(frozen=True)
class RunOptions(ConfiguredRun):
    """Predicts mesh, shapes, memory and step time of a run, from the trainer's own flags.

    Two ways to start:
      # a recipe on its machine
      armillary-plan run --recipe llama3_8b_1m --cluster 8xh100
      # a file, and settings that differ from it
      armillary-plan run --config planned.toml --cluster 16xh100 --data.sequence-length 256Ki

    Exit code 1: the run does not fit.
    """

    cluster: str = "8xh100"
    """8xh100, 16xh200, 8xa100-80, ..., or a TOML file. The run has one rank on each accelerator."""
    json: bool = False
    """Print JSON."""


def main(argv: Sequence[str], program: str) -> bool:
    options, _ = read_run(argv, RunOptions, program)
    with Bar("simulating", quiet=options.json) as bar:
        result = predict(options.run, options.cluster, partial(bar.show, "simulating"))
    if options.json:
        print(json.dumps(asdict(result) | {"fits": result.fits, "mfu": result.mfu}, indent=2))
    else:
        show(result)
    return result.fits


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of a run on a cluster. The memory is that of rank `Job.rank`.

    Args:
        bound: True if `memory` is an upper bound. Under policy "none", the simulated CPU kernels save up to 1.4 times
            as many bytes for backward as CUDA's kernels; with chunked MLPs, which save less, up to 2.3 times.
        time: predicted time of a step, under a causal mask even if the run packs documents.
        limit: seconds that a step may take before the run's watchdog ends the run.
        advice: the nearest changes with which the step fits; None if it fits, or if the method has no formulas.
    """

    run: DryRun
    cluster: Cluster
    room: Room
    memory: StepMemory
    bound: bool
    time: StepTime
    limit: float
    advice: str | None = None

    @property
    def fits(self) -> bool:
        return self.room.share(self.memory) <= 1

    @property
    def mfu(self) -> float:
        """MFU: the model's FLOPs of a step, divided by those that the cluster could do in the predicted time."""
        peak = self.cluster.ranks * self.cluster.accelerator.flops  # FLOP/s
        return self.run.flops / (self.time.seconds * peak)


def predict(config: Config, cluster: str, progress: Progress = lambda _done, _total: None) -> Prediction:
    """Predicts memory and time of a step on `cluster`, a preset's name or a TOML file.

    Raises:
        DoesNotFitError: the step needs so much memory that a simulation would take too long.
    """
    machines = cluster_of(cluster)
    run = dry_run(config, machines.ranks, machines.accelerator.compute_capability)
    job = job_of(config, run.axes, run.model, precision_of(config))
    room = Room.of(machines)
    # If the method has formulas for its memory, they refuse a step that is far too large before a long simulation.
    has_formulas = not job.method.missing(*FORMULAS)
    if has_formulas:
        check_simulated(job, machines, room, "--data.sequence-length")
    memory = memory_of(config, job, run.local_parameters, progress)
    return Prediction(
        run=run,
        cluster=machines,
        room=room,
        memory=memory,
        bound=config.checkpointing.policy == "none",
        time=time_of(config, job, machines),
        limit=60 * config.train.timeout_minutes,
        advice=advice(job, machines, room) if has_formulas and room.share(memory) > 1 else None,
    )


def memory_of(config: Config, job: Job, local_parameters: int, progress: Progress) -> StepMemory:
    """Returns the simulated memory of a step, with the gradients that the run accumulates over micro-batches."""
    memory = simulate(job, progress)
    # Under ZeRO stages 2 and 3 one micro-batch is simulated. Add the float32 gradients of the earlier ones: an upper
    # bound, because the simulated peak already contains the gradients of some parameters.
    if config.train.accumulation == 1 or job.zero_stage == 1:
        return memory
    place, sizes = ("host", memory.host_breakdown) if job.on_host else ("device", memory.device_breakdown)
    gradient_bytes = FLOAT32_BYTES * local_parameters
    sizes = sizes | {"gradients": sizes.get("gradients", 0) + gradient_bytes}
    return replace(memory, **{place: getattr(memory, place) + gradient_bytes, f"{place}_breakdown": sizes})


def time_of(config: Config, job: Job, cluster: Cluster) -> StepTime:
    """Returns the predicted time of a step: the sum over its micro-batches, and one optimizer update."""
    margin = sm_margin(config, job.axes["ring"])
    micro_batch = step_time(job, passes_of(job, cluster, config.data.layout, config.parallel.kernel, margin), cluster)
    seconds_by_part = {name: config.train.accumulation * seconds for name, seconds in micro_batch.parts().items()}
    step_parts = {"optimizer": micro_batch.optimizer}
    if job.zero_stage == 1:  # gathers parameters and reduces gradients once a step, not once a micro-batch
        step_parts["parameters"] = micro_batch.parameters
    return StepTime(**seconds_by_part | step_parts)


def job_of(config: Config, axes: Mapping[str, int], model: LlamaConfig | GPTConfig, dtype: torch.dtype) -> Job:
    """Returns the `Job` of a configuration: one rank's micro-batch, for `simulate` or `estimate`."""
    parallel = config.parallel
    return Job(
        model=model,
        axes=axes,
        attention=AttentionChoice(
            parallel.attention, parallel.heads_per_stage, parallel.team, parallel.placement, parallel.nodes
        ),
        length=config.data.sequence_length,
        rows=config.rows_per_batch,
        checkpointing=config.checkpointing,
        zero_stage=parallel.zero_stage,
        micro_batches=config.train.accumulation,
        on_host=config.optimizer.cpu_offload,
        precision=dtype,
        contiguous_states=parallel.contiguous_states,
    )


# -- output ------------------------------------------------------------------------------------------------------------


def show(prediction: Prediction) -> None:
    """Prints the output of the trainer's dry run, then whether the run fits into memory, and how long a step takes."""
    run, time = prediction.run, prediction.time
    print_dry_run(run, f", on {prediction.cluster.name}")
    print_table(COLUMNS, memory_rows(prediction.memory, prediction.room))
    fits = "fits" if prediction.fits else "does not fit"
    print(f"\nmemory: {fits}, by simulation: {fullness(prediction.room, prediction.memory)}")
    if prediction.advice is not None:
        print(prediction.advice)
    if prediction.bound:
        print("an upper bound: with --checkpointing.policy none, CUDA's kernels save less than the simulated ones")
    work = f"{run.tokens_per_step:,} tokens, {run.flops:.3g} FLOPs"
    print(f"a step: {work}, {duration(time.seconds)} by its communication plan, an MFU of {prediction.mfu:.1%}")
    if time.seconds > prediction.limit:
        print(f"longer than --train.timeout-minutes ({duration(prediction.limit)}), after which the run would end")
