"""`armillary-plan memory`: peak memory of a model's training step on a cluster, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd

from armillary.attention.plans import named_method
from armillary.models import Checkpointing, GPTConfig
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.memory import Job, StepMemory, simulate
from armillary.plan.memory.advice import advice, check_simulated
from armillary.plan.memory.estimate import AttentionChoice, Estimate, estimate
from armillary.plan.memory.room import (
    HOST_RESERVE,
    RESERVE,
    DoesNotFitError,
    LongestFit,
    Room,
    longest_fit,
)
from armillary.plan.presets import (
    Bytes,
    Model,
    Quantity,
    amount,
    byte_amount,
    cluster_of,
    is_hybrid,
    model_of,
    pretrained_folder,
)
from armillary.train.config import Count, CountOrNone, check_limits


@dataclass(frozen=True)
class MemoryOptions:
    """Simulates a training step without a GPU, and prints its peak memory by category.

    Three ways to start:
      # 6 million tokens on a node
      armillary-plan memory --model llama3-8b --cluster 8xh100 --tokens 6M
      # the longest sequence that fits
      armillary-plan memory --model llama3-8b --cluster 8xh100 --max-context
      # another method, with optimizer and master weights on the device
      armillary-plan memory --tokens 256Ki --attention usp --ulysses 4 --no-on-host

    Runs the real model, sharded by the real FSDP2, on tensors without storage. Exit code 1: the step does not fit.
    """

    model: str = "llama3-8b"
    """llama3-8b, llama3-70b, llama2-7b, qwen3-32b, hybrid-8b, gpt-3b, gpt-7b, debug, or a Hugging Face folder."""
    cluster: str = "8xh100"
    """8xh100, 16xh100, 8xa100-40, 8xa100-80, 8xh200, 8xl20, more nodes of these, or a TOML file."""
    tokens: Quantity = "1M"
    """Sequence length: 5M, 128Ki, ... With --max-context, the length near which the search starts."""
    max_context: bool = False
    """Find the longest sequence that fits."""
    attention: str = "upipe"
    """Method, as for the trainer's --parallel.attention."""
    heads_per_stage: CountOrNone = None
    """upipe: query heads per stage; by default one for each rank of the head axis."""
    shard: Count = 1
    """Size of the mesh axis `shard`: number of groups of ranks that train on different sequences."""
    ring: CountOrNone = None
    """Ranks on the sequence axis; by default all ranks that shard and ulysses leave."""
    ulysses: CountOrNone = None
    """Ranks on the head axis; by default all ranks that shard and ring leave, for methods that also have a ring the
    largest number that divides these, the ranks of a node and the key/value heads, and 1 without a head axis."""
    rows: Count = 1
    """Sequences in the batch of each group of ring x ulysses ranks."""
    checkpointing: Checkpointing = field(
        default_factory=lambda: Checkpointing(policy="layer", offload=True, prefetch=False)
    )
    on_host: bool = True
    """Keep master weights, their gradients and the optimizer's state in the host's memory."""
    reserve: Bytes = RESERVE
    """Memory of each device that is reserved for the CUDA context, NCCL, libraries and fragmentation."""
    host_memory: Bytes | None = None
    """Memory of each node; by default the cluster's."""
    host_reserve: Bytes = HOST_RESERVE
    """Memory of each node that is reserved for the system, data loaders and rounding of pinned memory."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class MemoryResult:
    """Memory of a step: simulated and estimated.

    Args:
        options: the command's options. `model`, `cluster`, `axes`, `room` and `length` are what they resolve to.
        fit: the longest sequence that fits, if the options ask for it (`max_context`).
    """

    options: MemoryOptions
    model: Model
    cluster: Cluster
    axes: dict[str, int]
    room: Room
    length: int
    memory: StepMemory
    estimate: Estimate
    fit: LongestFit | None = None

    @property
    def fits(self) -> bool:
        """True if the simulated step fits into memory."""
        return self.room.share(self.memory) <= 1

    @property
    def job(self) -> Job:
        """The training step that was simulated."""
        return job_of(self.options, self.axes, self.length)


def plan_memory(
    options: MemoryOptions, progress: Callable[[str, int, int], None] = lambda _activity, _done, _total: None
) -> MemoryResult:
    """Simulates the training step, or with `max_context` the longest one that fits.

    Args:
        progress: called with a simulation's title, the number of gradients so far, and their total number.

    Raises:
        ValueError: an unknown name, axes that do not match the cluster or the model, or reserves that leave no memory.
        DoesNotFitError: the step needs so much memory that a simulation would take too long; or no length fits.
    """
    check_limits(options)
    cluster = cluster_of(options.cluster)
    if options.host_memory is not None:
        cluster = replace(cluster, host_memory=byte_amount(options, "host_memory"))
    room = Room.of(cluster, byte_amount(options, "reserve"), byte_amount(options, "host_reserve"))
    length = amount(options, "tokens")
    model = model_of(options.model, length)
    if options.max_context and isinstance(model, GPTConfig) and pretrained_folder(options.model) is not None:
        raise ValueError(
            f"--max-context: {options.model} has {model.max_positions:,} learned positions; give --tokens instead"
        )
    axes = mesh_axes(options, model, cluster)

    def simulate_length(length: int) -> StepMemory:
        return simulate(job_of(options, axes, length), partial(progress, f"{length:,} tokens"))

    # `longest_fit` searches with this faster prediction, and simulates only the lengths that it finds.
    def predict_length(length: int) -> StepMemory | Estimate:
        job, policy = job_of(options, axes, length), options.checkpointing
        if is_hybrid(job.model) or (policy.inputs, policy.outputs, policy.on_device) != (None, None, 0):
            return estimate(job)
        # If every block has the same checkpoints, memory is linear in the number of blocks: simulate two and three.
        title = f"{length:,} tokens in a few blocks"
        two, three = (
            simulate(replace(job, model=replace(job.model, layers=n)), partial(progress, title)) for n in (2, 3)
        )
        further_blocks = job.model.layers - 2
        device, host = (a + further_blocks * (b - a) for a, b in ((two.device, three.device), (two.host, three.host)))
        return replace(three, device=device, host=host)

    check_simulated(job_of(options, axes, length), cluster, room, "--tokens")
    multiple = 1024 * cluster.ranks  # the search tries multiples of this length: every rank has equally many tokens
    try:
        fit = (
            longest_fit(simulate_length, predict_length, room, multiple, start=length) if options.max_context else None
        )
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{error}; {advice(job_of(options, axes, multiple), cluster, room)}") from error
    # The model depends on the length, because a GPT has learned positions.
    length = length if fit is None else fit.length
    return MemoryResult(
        options=options,
        model=model_of(options.model, length),
        cluster=cluster,
        axes=axes,
        room=room,
        length=length,
        memory=simulate_length(length) if fit is None else fit.memory,
        estimate=estimate(job_of(options, axes, length)),
        fit=fit,
    )


def job_of(options: MemoryOptions, axes: dict[str, int], length: int) -> Job:
    """Returns the training step to simulate, for a sequence of `length` tokens."""
    return Job(
        model=model_of(options.model, length),
        axes=axes,
        attention=AttentionChoice(options.attention, options.heads_per_stage),
        length=length,
        rows=options.rows,
        checkpointing=options.checkpointing,
        on_host=options.on_host,
    )


def mesh_axes(options: MemoryOptions, model: Model, cluster: Cluster) -> dict[str, int]:
    """Returns the sizes of the mesh axes, with defaults for ring and ulysses.

    Raises:
        ValueError: the product of the sizes is not the cluster's number of ranks.
    """
    ranks, method_axes = max(1, cluster.ranks // options.shard), named_method(options.attention).axes
    free_ranks = ranks // (options.ring or 1)
    if options.ulysses is not None:
        ulysses = options.ulysses
    elif method_axes == ("ring", "ulysses"):
        # The head axis stays in a node, where links are fast, and divides the key/value heads.
        ulysses = gcd(model.kv_heads, cluster.ranks_per_node, free_ranks)
    else:
        ulysses = free_ranks if "ulysses" in method_axes else 1
    ring = max(1, ranks // ulysses) if options.ring is None else options.ring
    if options.shard * ring * ulysses != cluster.ranks:
        raise ValueError(
            f"shard {options.shard} x ring {ring} x ulysses {ulysses} = {options.shard * ring * ulysses} ranks, but "
            f"{cluster.name} has {cluster.ranks}"
        )
    return {"shard": options.shard, "ring": ring, "ulysses": ulysses}
