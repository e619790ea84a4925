"""Predicted time and memory of a training step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from armillary.models import Checkpointing
from armillary.plan import Cluster
from armillary.plan.comm_time.step_time import StepTime, step_time
from armillary.plan.memory import Job
from armillary.plan.memory.estimate import AttentionChoice, Estimate, estimate
from armillary.plan.memory.room import Room
from armillary.plan.presets import model_of
from armillary.plan.search.candidates import Candidate, Mesh
from armillary.plan.search.search import passes_of


@dataclass(frozen=True)
class Step:
    """A step's prediction; `room` is the memory that one rank may use."""

    time: StepTime
    memory: Estimate
    mfu: float
    room: Room

    @property
    def gib(self) -> float:
        return self.memory.device / 2**30

    @property
    def fits(self) -> bool:
        return self.room.share(self.memory) <= 1


@cache
def predicted(
    model: str,
    cluster: str,
    length: int,
    attention: AttentionChoice,
    ulysses: int = 1,
    checkpointing: Checkpointing | None = None,
    kernel: str | None = None,
    on_host: bool = False,
    crossing: float | None = None,
) -> Step:
    """One sequence over all ranks, ring x ulysses; by default attention's outputs are stored.

    Args:
        crossing: bytes a second between nodes, in place of the preset's.
    """
    machines, sizes = Cluster.named(cluster), model_of(model, length)
    if crossing is not None:
        machines = replace(machines, between=replace(machines.between, bandwidth=crossing))
    candidate = Candidate(Mesh(1, machines.ranks // ulysses, ulysses), attention)
    job = Job(
        model=sizes,
        axes=candidate.mesh.axes,
        attention=attention,
        length=length,
        checkpointing=checkpointing or Checkpointing("attention_output"),
        on_host=on_host,
    )
    time = step_time(job, passes_of(candidate, sizes, machines, length, 1, kernel), machines)
    flops = length * sizes.flops_per_token(length) / machines.ranks
    mfu = flops / time.seconds / machines.accelerator.flops
    return Step(time, estimate(job), mfu, Room.of(machines))
