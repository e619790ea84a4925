"""`armillary-plan memory`: peak memory of a model's training step on a cluster, and the longest sequence that fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import gcd
from typing import Any

from armillary.attention.internal import named_method
from armillary.data.console import Bar, Column, byte_quantity, gib, parse, print_lines, print_table, short
from armillary.models import Checkpointing, GPTConfig
from armillary.plan.arguments import (
    Bytes,
    Model,
    Quantity,
    amount,
    cluster_of,
    is_hybrid,
    model_of,
    model_size,
    pretrained_folder,
)
from armillary.plan.cluster import Cluster
from armillary.plan.memory import AttentionChoice, Estimate, Job, StepMemory, estimate, simulate
from armillary.plan.memory.room import (
    HOST_RESERVE,
    RESERVE,
    DoesNotFitError,
    LongestFit,
    Room,
    advice,
    check_simulated,
    longest_fit,
    policy_text,
)
from armillary.plan.search.candidates import Mesh
from armillary.train.config import Count, CountOrNone, check_limits

COLUMNS = (Column("one rank", text=True), Column("device (GiB)"), Column("host (GiB)"))


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

    def job(self, axes: Mapping[str, int], length: int) -> Job:
        return Job(
            model=model_of(self.model, length),  # depends on the length, because a GPT has learned positions
            axes=axes,
            attention=AttentionChoice(self.attention, self.heads_per_stage),
            length=length,
            rows=self.rows,
            checkpointing=self.checkpointing,
            on_host=self.on_host,
        )


def main(argv: Sequence[str], program: str) -> bool:
    options = parse(argv, MemoryOptions, program)
    with Bar("simulating", quiet=options.json) as bar:
        result = plan_memory(options, bar.show)
    if options.json:
        print(json.dumps(as_dict(result), indent=2))
    else:
        show(result)
    return result.fits


@dataclass(frozen=True)
class MemoryResult:
    """Memory of a step: simulated and estimated. `fit` is the longest sequence that fits, if the options ask for it."""

    options: MemoryOptions
    job: Job
    cluster: Cluster
    room: Room
    memory: StepMemory
    estimate: Estimate
    fit: LongestFit | None = None

    @property
    def fits(self) -> bool:
        return self.room.share(self.memory) <= 1


def plan_memory(
    options: MemoryOptions, progress: Callable[[str, int, int], None] = lambda _activity, _done, _total: None
) -> MemoryResult:
    """Simulates the training step, or with `max_context` the longest one that fits.

    Raises:
        DoesNotFitError: the step needs so much memory that a simulation would take too long; or no length fits.
    """
    check_limits(options)
    cluster = cluster_of(options.cluster)
    if options.host_memory is not None:
        cluster = replace(cluster, host_memory=amount(options, "host_memory", byte_quantity))
    room = Room.of(cluster, amount(options, "reserve", byte_quantity), amount(options, "host_reserve", byte_quantity))
    length = amount(options, "tokens")
    model = model_of(options.model, length)
    if options.max_context and isinstance(model, GPTConfig) and pretrained_folder(options.model) is not None:
        raise ValueError(
            f"--max-context: {options.model} has {model.max_positions:,} learned positions; give --tokens instead"
        )
    job_at = partial(options.job, mesh_axes(options, model, cluster))

    def simulate_length(length: int) -> StepMemory:
        return simulate(job_at(length), partial(progress, f"{length:,} tokens"))

    # `longest_fit` searches with this faster prediction, and simulates only the lengths that it finds.
    def predict_length(length: int) -> StepMemory | Estimate:
        job, policy = job_at(length), options.checkpointing
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

    check_simulated(job_at(length), cluster, room, "--tokens")
    if not options.max_context:
        job = job_at(length)
        return MemoryResult(options, job, cluster, room, simulate_length(length), estimate(job))
    multiple = 1024 * cluster.ranks  # the search tries multiples of this length: every rank has equally many tokens
    try:
        fit = longest_fit(simulate_length, predict_length, room, multiple, start=length)
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{error}; {advice(job_at(multiple), cluster, room)}") from error
    job = job_at(fit.length)
    return MemoryResult(options, job, cluster, room, fit.memory, estimate(job), fit)


def mesh_axes(options: MemoryOptions, model: Model, cluster: Cluster) -> dict[str, int]:
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


# -- output ------------------------------------------------------------------------------------------------------------


def as_dict(result: MemoryResult) -> dict[str, Any]:
    """Returns all figures as JSON values. Sizes are in bytes, except for "plan", the options as they were given."""
    fields: dict[str, Any] = {
        "plan": asdict(result.options),
        "model": asdict(result.job.model),
        "parameters": result.job.model.parameters(),
        "cluster": asdict(result.cluster),
        "axes": result.job.axes,
        "room": asdict(result.room),
        "tokens": result.job.length,
        "memory": asdict(result.memory),
        "estimate": asdict(result.estimate),
        "fits": result.fits,
    }
    if not result.fits:
        fields["advice"] = advice(result.job, result.cluster, result.room)
    # With --max-context: the memory that limits the length, and what a million tokens more would need.
    if result.fit is not None:
        fields["limit"] = result.room.limit(result.fit.longer)
        fields["longer"] = {"tokens": result.fit.longer_length, "memory": asdict(result.fit.longer)}
    return fields


def show(result: MemoryResult) -> None:
    """Prints the peak memory by category, whether the sequence fits, the estimate, and the simulation's time."""
    options, job, room, memory = result.options, result.job, result.room, result.memory
    print_lines(f"{options.model}, {model_size(job.model)}, on {result.cluster.name}")
    checkpoints, optimizer = policy_text(options.checkpointing), "host" if options.on_host else "device"
    print(f"{options.attention} ({Mesh(**job.axes)}), checkpoints: {checkpoints}, optimizer: on the {optimizer}")
    tokens_per_rank = short(job.length // (job.axes["ring"] * job.axes["ulysses"]))
    print(f"a sequence of {job.length:,} tokens, {tokens_per_rank} on a rank\n")
    print_table(COLUMNS, memory_rows(memory, room))
    print()
    if result.fit is not None:
        # Which memory limits the length, and what a million tokens more would need.
        longer = result.fit.longer
        spare = {
            place: f"{gib(need)} GiB ({gib(abs(need - size))} {'missing' if need > size else 'to spare'})"
            for place, need, size in (("device", longer.device, room.device), ("host", longer.host, room.host))
        }
        print(f"the longest that fits; the limit is the {room.limit(longer)}'s memory")
        longer_tokens = short(result.fit.longer_length)
        print(f"{longer_tokens} would need {spare['device']} on the device and {spare['host']} on the host")
    else:
        print(f"{'fits' if result.fits else 'does not fit'}: {fullness(room, memory)}")
        if not result.fits:
            print(advice(job, result.cluster, room))
    device, host = gib(result.estimate.device), gib(result.estimate.host)
    print(f"by closed formulas: {device} GiB on the device, {host} GiB on the host")
    print(f"(simulated in {memory.seconds:.0f} s, {memory.ops:,} operations; the peak is during {memory.label})")


def memory_rows(memory: StepMemory, room: Room) -> Iterator[list[str]]:
    """Yields the table's rows: GiB by category at the peak of device and of host, then the two peaks and the room."""
    device, host = memory.device_breakdown, memory.host_breakdown
    # Sort by bytes on the device. Bytes on the host have a small weight, which orders categories that are only there.
    for name in sorted({**device, **host}, key=lambda name: -device.get(name, 0) - host.get(name, 0) / 1e6):
        yield [name, *(gib(sizes[name]) if sizes.get(name) else "" for sizes in (device, host))]
    yield []
    yield ["peak", gib(memory.device), gib(memory.host)]
    yield ["room", gib(room.device), gib(room.host)]


def fullness(room: Room, memory: StepMemory) -> str:
    """Describes the fuller memory, such as "the host's memory is 88% full"."""
    return f"the {room.limit(memory)}'s memory is {room.share(memory):.0%} full"
