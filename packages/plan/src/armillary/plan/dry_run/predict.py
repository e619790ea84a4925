"""Memory and time of a step that a configuration of the trainer asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import tyro

from armillary.core.quantity import quantity
from armillary.data.parsing import parse
from armillary.models import GPTConfig, LlamaConfig
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.step_time import StepTime, step_time
from armillary.plan.memory import Job, StepMemory, simulate
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.memory.room import HOST_RESERVE, RESERVE, Room
from armillary.plan.memory.simulation.simulate import Progress
from armillary.plan.presets import cluster_of
from armillary.plan.search.candidates import Candidate, Mesh
from armillary.plan.search.search import passes_of
from armillary.train.config import Config
from armillary.train.config.command import Source, read_source
from armillary.train.dry_run import DryRun, dry_run
from armillary.train.dry_run.predict import precision_of


@dataclass(frozen=True)
class RunPlan(Source):
    """Predicts mesh, shapes, memory and step time of a run, from the trainer's own flags.

    Two ways to start:
      # a recipe on its machine
      armillary-plan run --recipe llama3_8b_1m --cluster 8xh100
      # a file, and what differs from it
      armillary-plan run --config planned.toml --cluster 16xh100 --data.sequence-length 256Ki
    """

    cluster: str = "8xh100"
    """8xh100, 16xh200, 8xa100-80, ..., or a TOML file that describes one. The run has a rank for each accelerator."""
    json: bool = False
    """Print JSON."""
    run: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def read_plan(argv: Sequence[str], program: str) -> RunPlan:
    """The plan, from a command line with a recipe, a file and flags as the trainer takes them. Errors as in `parse`."""
    source, _, config = read_source(argv, program)
    return parse(argv, RunPlan, program, RunPlan(source.recipe, source.config, run=config))


@dataclass(frozen=True)
class Prediction:
    """A run on a cluster, as rank 0 will have it.

    Args:
        memory: of a step; None under tensor parallelism, which is not simulated.
        bound: whether `memory` is more than CUDA holds: where blocks keep all that autograd wants, the CPU's kernels,
            which are simulated, keep up to 1.4 times as much.
        time: None with replicas and under tensor parallelism, whose messages are not planned for.
        limit: seconds that the configuration allows a step.
    """

    run: DryRun
    cluster: Cluster
    room: Room
    memory: StepMemory | None
    bound: bool
    time: StepTime | None
    limit: float

    @property
    def fits(self) -> bool | None:
        """Whether memory suffices; None where that is not known."""
        return None if self.memory is None else self.room.share(self.memory) <= 1

    @property
    def mfu(self) -> float | None:
        """Share of the cluster's peak that the model's FLOPs are, by the predicted time."""
        peak = self.cluster.ranks * self.cluster.accelerator.flops
        return None if self.time is None else self.run.flops / (self.time.seconds * peak)


def predict(config: Config, cluster: str, progress: Progress = lambda _done, _of: None) -> Prediction:
    """What a step takes of memory and time.

    Args:
        progress: of the simulation, as `simulate` has it.

    Raises:
        ValueError: a configuration that could not be trained, or no such cluster.
    """
    machines = cluster_of(cluster)
    found = dry_run(config, machines.ranks, machines.accelerator.compute_capability)
    job = job_of(config, found.axes, found.model, precision_of(config))
    alone = found.axes["tp"] == 1
    return Prediction(
        run=found,
        cluster=machines,
        room=Room.of(machines, quantity(RESERVE), quantity(HOST_RESERVE)),
        memory=memory_of(config, job, found.local_parameters, progress) if alone else None,
        bound=config.checkpointing.policy == "none",
        time=time_of(config, job, machines) if alone and found.axes["replicate"] == 1 else None,
        limit=60 * config.train.timeout_minutes,
    )


def memory_of(config: Config, job: Job, local_parameters: int, progress: Progress) -> StepMemory:
    """What a step holds. Gradients of earlier parts of it are there all the while, in 4 bytes a number: a bound, since
    some of them are counted in any case."""
    found = simulate(job, progress)
    if config.train.accumulation == 1:
        return found
    more = 4 * local_parameters
    where, sizes = ("host", found.host_breakdown) if job.on_host else ("device", found.device_breakdown)
    total, sizes = getattr(found, where) + more, sizes | {"gradients": sizes.get("gradients", 0) + more}
    return replace(found, **{where: total, f"{where}_breakdown": sizes})


def time_of(config: Config, job: Job, cluster: Cluster) -> StepTime:
    """Seconds of a step, of which each part is as long as another."""
    assert isinstance(job.attention, AttentionChoice)
    mesh = Mesh(job.axes["shard"], job.axes["ring"], job.axes["ulysses"])
    rows = job.rows * mesh.shard
    passes = passes_of(Candidate(mesh, job.attention), job.model, cluster, job.length, rows, config.parallel.kernel)
    parts, once = config.train.accumulation, step_time(job, passes, cluster)
    times = {name: parts * seconds for name, seconds in once.parts().items()}
    return StepTime(**times | {"optimizer": once.optimizer})


def job_of(config: Config, axes: Mapping[str, int], model: LlamaConfig | GPTConfig, dtype: torch.dtype) -> Job:
    """The step of one rank, as memory is estimated and simulated for."""
    parallel = config.parallel
    return Job(
        model=model,
        axes=axes,
        attention=AttentionChoice(parallel.attention, parallel.heads_per_stage, parallel.team, parallel.placement),
        length=config.data.sequence_length,
        rows=config.rows_per_batch,
        checkpointing=config.checkpointing,
        on_host=config.optimizer.cpu_offload,
        precision=dtype,
    )
