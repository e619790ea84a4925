"""Predicted time and memory of a training step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from armillary.models import Checkpointing
from armillary.plan import Cluster
from armillary.plan.arguments import model_of
from armillary.plan.memory import AttentionChoice, Estimate, Job, estimate
from armillary.plan.memory.room import Room
from armillary.plan.search.candidates import Mesh
from armillary.plan.time.passes import passes_of
from armillary.plan.time.step_time import StepTime, step_time


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
    job = Job(
        model=sizes,
        axes=Mesh(1, machines.ranks // ulysses, ulysses).axes,
        attention=attention,
        length=length,
        checkpointing=checkpointing or Checkpointing("attention_output"),
        on_host=on_host,
    )
    time = step_time(job, passes_of(job, machines, kernel=kernel), machines)
    flops = length * sizes.flops_per_token(length) / machines.ranks
    mfu = flops / time.seconds / machines.accelerator.flops
    return Step(time, estimate(job), mfu, Room.of(machines))
