"""`armillary-plan`: which mesh, method and checkpoints train a model fastest on a cluster, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from armillary.attention import AttentionMask
from armillary.attention.comm_plan import AttentionShape
from armillary.attention.kernels.chosen import check_kernel_name
from armillary.models import Checkpointing
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.comm_time.step_time import Passes, StepTime, step_time
from armillary.plan.memory import Job
from armillary.plan.memory.estimate import Estimate, estimate
from armillary.plan.memory.room import HOST_RESERVE, RESERVE, Room, missing
from armillary.plan.presets import Model, Quantity, amount, cluster_of, model_of
from armillary.plan.search.candidates import Candidate, candidates, is_one_of, policies
from armillary.plan.search.fit_policy import fitted
from armillary.train.config.limits import Count, check_limits

AS_FAST = 1e-3
"""By so much of its time a choice may be slower than another, and be taken because it leaves more memory free."""


@dataclass(frozen=True)
class SearchPlan:
    """Finds the fastest way to train a model on a cluster, by arithmetic: nothing is run, and no GPU is needed.

    Three ways to start:
      # all meshes and methods on 16 GPUs
      armillary-plan search --model llama3-8b --cluster 16xh100-ethernet --tokens 256Ki
      # the best as a file for armillary-train --config
      armillary-plan search --cluster 8xh100 --tokens 128Ki --out planned.toml
      # two methods alone, drawn
      armillary-plan search --tokens 1M --attention usp upipe --plot best.png
    """

    model: str = "llama3-8b"
    """llama3-8b, llama3-70b, llama2-7b, qwen3-32b, gpt-3b, gpt-7b or debug."""
    cluster: str = "8xh100"
    """8xh100, 16xh100-ethernet, 32xa100-40, 8xl20, ..., or a TOML file that describes one."""
    tokens: Quantity = "128Ki"
    """Length of a sequence."""
    rows: Count = 1
    """Sequences of a step, over all ranks."""
    attention: tuple[str, ...] = ()
    """Only these methods, as --parallel.attention has them."""
    kernel: str | None = None
    """Attention kernel, as --parallel.kernel has it; by default the fastest that torch ships."""
    best: Count = 10
    """Number of candidates to show."""
    reserve: Quantity = RESERVE
    """Memory of each device to reserve for CUDA, NCCL and fragmentation."""
    host_reserve: Quantity = HOST_RESERVE
    """Memory of each node to reserve for the system."""
    plot: Path | None = None
    """PNG file for a plot of the best."""
    out: Path | None = None
    """TOML file for the best, for armillary-train --config."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Choice:
    """A candidate with the checkpoints that make it fastest, or that come nearest to fitting."""

    candidate: Candidate
    checkpointing: Checkpointing
    on_host: bool
    time: StepTime
    memory: Estimate
    fits: bool
    mfu: float

    def job(self, found: SearchResult) -> Job:
        """The step that was planned, to be simulated."""
        return job_of(self.candidate, found.model, found.length, found.plan.rows, self.on_host, self.checkpointing)


@dataclass(frozen=True)
class SearchResult:
    """What was asked, in full, and all choices: those that fit, fastest first, and then those that don't."""

    plan: SearchPlan
    model: Model
    cluster: Cluster
    room: Room
    length: int
    choices: list[Choice] = field(default_factory=list[Choice])
    others: list[Choice] = field(default_factory=list[Choice])
    """The first choice's mesh and method with all else that blocks may keep, the same way."""

    @property
    def fitting(self) -> list[Choice]:
        """Those that fit, fastest first."""
        return [choice for choice in self.choices if choice.fits]

    def reason(self, choice: Choice) -> str:
        """Why a choice is not the first."""
        if not choice.fits:
            return f"does not fit: {missing(choice.memory, self.room)}"
        best = self.fitting[0].time
        more = {name: part - best.parts()[name] for name, part in choice.time.parts().items()}
        lost = sorted(((amount, name) for name, amount in more.items() if amount > 0), reverse=True)
        behind = choice.time.seconds - best.seconds
        if behind <= 0 or not lost:
            return "as fast"
        named = [f"{name} +{duration(amount)}" for amount, name in lost if amount > behind / 10][:3]
        return f"{choice.time.seconds / best.seconds - 1:.1%} slower: {', '.join(named)}"


def search(plan: SearchPlan, progress: Callable[[int, int], None] = lambda _done, _of: None) -> SearchResult:
    """Evaluates all candidates.

    Args:
        progress: called with the numbers of candidates done, and of all.

    Raises:
        ValueError: an unknown name, a length or rows that no candidate takes.
    """
    check_limits(plan)
    check_kernel_name("--kernel", plan.kernel)
    cluster, length = cluster_of(plan.cluster), amount(plan, "tokens")
    model = model_of(plan.model, length)
    room = Room.of(cluster, amount(plan, "reserve"), amount(plan, "host_reserve"))
    wanted = [c for c in candidates(model.heads, cluster.ranks, plan.rows) if is_one_of(c.attention, plan.attention)]
    if not wanted:
        raise ValueError(
            f"no candidates: {plan.rows} rows on {cluster.ranks} ranks, --attention "
            f"{' '.join(plan.attention) or 'of any kind'}"
        )
    found = list[list[Choice]]()
    for i, candidate in enumerate(wanted):
        progress(i, len(wanted))
        passes = passes_of(candidate, model, cluster, length, plan.rows, plan.kernel)
        found.append(choices_of(candidate, model, cluster, length, plan.rows, room, passes))

    def rank(choice: Choice) -> tuple[bool, float]:
        return not choice.fits, choice.time.seconds if choice.fits else room.share(choice.memory)

    found.sort(key=lambda several: rank(best_of(several, room)))
    choices = [best_of(several, room) for several in found]
    return SearchResult(plan, model, cluster, room, length, choices, sorted(found[0], key=rank))


def passes_of(
    candidate: Candidate, model: Model, cluster: Cluster, length: int, rows: int, kernel: str | None = None
) -> Passes:
    """Attention of a block, on causal zigzag sequences; by the fastest kernel that torch ships, or the one named."""
    mesh, attention = candidate.mesh, candidate.attention
    work = AttentionShape.of(
        attention.layout(length, mesh.ring),
        AttentionMask(),
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
        batch=rows // mesh.shard,
    )
    plan = attention.comm_plan(work, mesh.ring, mesh.ulysses)
    return Passes.of(plan, cluster, model.head_dim, mesh.shard, length, kernel)


def choices_of(
    candidate: Candidate, model: Model, cluster: Cluster, length: int, rows: int, room: Room, passes: Passes
) -> list[Choice]:
    """A candidate with all that blocks may keep, and as much of it as fits."""
    found = list[Choice]()
    for policy, on_host in policies():
        job = job_of(candidate, model, length, rows, on_host, policy)

        @cache
        def memory(checkpointing: Checkpointing, job: Job = job) -> Estimate:
            return estimate(replace(job, checkpointing=checkpointing))

        for checkpointing in fitted(policy, model.layers, memory, room):
            held, time = memory(checkpointing), step_time(replace(job, checkpointing=checkpointing), passes, cluster)
            flops = rows * length * model.flops_per_token(length)
            mfu = flops / (time.seconds * cluster.ranks * cluster.accelerator.flops)
            found.append(Choice(candidate, checkpointing, on_host, time, held, room.share(held) <= 1, mfu))
            if checkpointing == policy and found[-1].fits and time.offload <= AS_FAST * time.seconds:
                break  # all is kept, and nothing waits for it
    return found


def job_of(
    candidate: Candidate, model: Model, length: int, rows: int, on_host: bool, checkpointing: Checkpointing
) -> Job:
    """A candidate's step on one rank."""
    return Job(
        model=model,
        axes=candidate.mesh.axes,
        attention=candidate.attention,
        length=length,
        rows=rows // candidate.mesh.shard,
        checkpointing=checkpointing,
        on_host=on_host,
    )


def best_of(found: list[Choice], room: Room) -> Choice:
    """The fastest that fits, or one nearly as fast that leaves more memory; if none fits, what is fullest least."""
    if not any(choice.fits for choice in found):
        return min(found, key=lambda choice: room.share(choice.memory))
    fastest = min(choice.time.seconds for choice in found if choice.fits)
    as_fast = [choice for choice in found if choice.fits and choice.time.seconds <= (1 + AS_FAST) * fastest]
    return min(as_fast, key=lambda choice: room.share(choice.memory))


def duration(seconds: float) -> str:
    """For people: 2.1 h, 35 s, 120 ms."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
