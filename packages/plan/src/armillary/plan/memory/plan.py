"""`armillary-plan memory`: what a training step of a model takes on a cluster, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd

from armillary.attention.registry import named_method
from armillary.models import Checkpointing
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.memory import Job, StepMemory, simulate
from armillary.plan.memory.estimate import AttentionChoice, Estimate, estimate
from armillary.plan.memory.room import HOST_RESERVE, RESERVE, Fit, Room, longest
from armillary.plan.memory.simulation.simulate import Progress
from armillary.plan.presets import Model, Quantity, amount, cluster_of, model_of
from armillary.train.config.limits import Count, CountOrNone, check_limits

BEYOND = 4
"""A simulation takes as long as its step has chunks: beyond this share of the memory it is refused."""


@dataclass(frozen=True)
class MemoryPlan:
    """Simulates a training step without a GPU: its peak memory, by category.

    Three ways to start:
      # 6 million tokens on a node
      armillary-plan memory --model llama3-8b --cluster 8xh100 --tokens 6M
      # the longest sequence that fits
      armillary-plan memory --model llama3-8b --cluster 8xh100 --max-context
      # another method, and all on the device
      armillary-plan memory --tokens 256Ki --attention usp --ulysses 4 --no-on-host

    The model is the real one, sharded by the real FSDP2; its tensors hold no numbers.
    """

    model: str = "llama3-8b"
    """llama3-8b, llama3-70b, llama2-7b, qwen3-32b, gpt-3b, gpt-7b or debug."""
    cluster: str = "8xh100"
    """8xh100, 16xh100, 8xa100-40, 8xa100-80, 8xh200, 8xl20, more nodes of these, or a TOML file that describes one."""
    tokens: Quantity = "1M"
    """Length of a sequence: 5M, 128Ki, ... With --max-context, where to begin looking."""
    max_context: bool = False
    """Find the longest sequence that fits."""
    attention: str = "upipe"
    """As the trainer's --parallel.attention."""
    heads_per_stage: CountOrNone = None
    """Of upipe; by default one head for each rank of the head axis."""
    shard: Count = 1
    """Ranks that have sequences of their own."""
    ring: CountOrNone = None
    """Ranks on the sequence axis; by default what ulysses leaves."""
    ulysses: CountOrNone = None
    """Ranks on the head axis; by default all, or beside a ring as many of a node as share key/value heads evenly."""
    rows: Count = 1
    """Sequences of each rank."""
    checkpointing: Checkpointing = field(
        default_factory=lambda: Checkpointing(policy="layer", offload=True, prefetch=False)
    )
    on_host: bool = True
    """Master weights, their gradients and the optimizer's state in the host's memory."""
    reserve: Quantity = RESERVE
    """Of each device, for what is not torch's tensors: CUDA context, NCCL's buffers, libraries, fragments."""
    host_memory: Quantity | None = None
    """Of each node; by default the cluster's."""
    host_reserve: Quantity = HOST_RESERVE
    """Of each node, for what is not torch's tensors: system, loaders, and pinned memory's rounding up."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Planned:
    """What was asked, in full, and what was found."""

    plan: MemoryPlan
    model: Model
    cluster: Cluster
    axes: dict[str, int]
    room: Room
    length: int
    memory: StepMemory
    estimate: Estimate
    fit: Fit | None = None


def plan_memory(
    plan: MemoryPlan, progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None
) -> Planned:
    """Runs the simulations that a plan asks for.

    Args:
        progress: called with the subject of a simulation, and how many gradients of how many it has found.

    Raises:
        ValueError: an unknown name, axes that do not fit the cluster or the model, or no room for anything.
    """
    check_limits(plan)
    cluster = cluster_of(plan.cluster)
    if plan.host_memory is not None:
        cluster = replace(cluster, host_memory=amount(plan, "host_memory"))
    room = Room.of(cluster, amount(plan, "reserve"), amount(plan, "host_reserve"))
    length = amount(plan, "tokens")
    axes = axes_of(plan, model_of(plan.model, length), cluster)

    def measure(length: int) -> StepMemory:
        return simulate(job_of(plan, axes, length), partial(progress, f"{length:,} tokens"))

    def outlook(length: int) -> StepMemory | Estimate:
        if not alike(plan.checkpointing):
            return estimate(job_of(plan, axes, length))
        return from_few_blocks(job_of(plan, axes, length), partial(progress, f"{length:,} tokens in a few blocks"))

    def planned(length: int, memory: StepMemory, fit: Fit | None = None) -> Planned:
        closed = estimate(job_of(plan, axes, length))
        return Planned(plan, model_of(plan.model, length), cluster, axes, room, length, memory, closed, fit)

    if (share := room.share(estimate(job_of(plan, axes, length)))) > BEYOND:
        raise ValueError(
            f"--tokens {length:,}: by closed formulas a step takes {share:,.0f} times the memory that there is; "
            f"what is simulated may take up to {BEYOND} times as much, see --max-context"
        )
    if not plan.max_context:
        return planned(length, measure(length))
    fit = longest(measure, outlook, room, step=1024 * cluster.ranks, start=length)
    return planned(fit.length, fit.memory, fit)


def alike(checkpointing: Checkpointing) -> bool:
    """Whether all blocks keep the same, so that few of them tell of many."""
    return (checkpointing.inputs, checkpointing.outputs, checkpointing.on_device) == (None, None, 0)


def from_few_blocks(job: Job, progress: Progress) -> StepMemory:
    """Extrapolates from a step with two blocks and one with three: memory is linear in blocks."""
    two, three = (simulate(replace(job, model=replace(job.model, layers=n)), progress) for n in (2, 3))
    more = job.model.layers - 2

    def along(a: int, b: int) -> int:
        return a + more * (b - a)

    return replace(three, device=along(two.device, three.device), host=along(two.host, three.host))


def job_of(plan: MemoryPlan, axes: dict[str, int], length: int) -> Job:
    """The training step to simulate."""
    return Job(
        model=model_of(plan.model, length),
        axes=axes,
        attention=AttentionChoice(plan.attention, plan.heads_per_stage),
        length=length,
        rows=plan.rows,
        checkpointing=plan.checkpointing,
        on_host=plan.on_host,
    )


def axes_of(plan: MemoryPlan, model: Model, cluster: Cluster) -> dict[str, int]:
    """Sizes of the mesh axes, the open ones filled in.

    Raises:
        ValueError: they do not multiply to the ranks of the cluster.
    """
    left, divided = max(1, cluster.ranks // plan.shard), named_method(plan.attention).axes
    open_ranks = left // (plan.ring or 1)
    if plan.ulysses is not None:
        ulysses = plan.ulysses
    elif divided == ("ring", "ulysses"):
        ulysses = gcd(model.kv_heads, cluster.ranks_per_node, open_ranks)
    else:
        ulysses = open_ranks if "ulysses" in divided else 1
    ring = max(1, left // ulysses) if plan.ring is None else plan.ring
    if plan.shard * ring * ulysses != cluster.ranks:
        raise ValueError(
            f"shard {plan.shard} x ring {ring} x ulysses {ulysses} = {plan.shard * ring * ulysses} ranks, but "
            f"{cluster.name} are {cluster.ranks}"
        )
    return {"shard": plan.shard, "ring": ring, "ulysses": ulysses}
