"""The room of a rank: checkpoint policies and lengths that fit into its memory, and advice if nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from armillary.data.console import byte_quantity, gib
from armillary.models import Checkpointing
from armillary.models.internal import best_input_count
from armillary.plan.arguments import is_hybrid
from armillary.plan.cluster import Cluster
from armillary.plan.memory import AttentionChoice, Estimate, Job, StepMemory, estimate
from armillary.plan.search.candidates import Mesh, candidates

# Default reserves of a device and of a machine: memory that is not available to torch's tensors.
RESERVE, HOST_RESERVE = "5GiB", "100GB"

# Memory of a step, simulated or estimated.
Usage = StepMemory | Estimate


class DoesNotFitError(Exception):
    """A step, or every sequence length, needs more memory than there is. The arguments are valid: exit code 1."""


@dataclass(frozen=True)
class Room:
    """Bytes that one rank may use of its device, and of its share of the machine's memory."""

    device: int
    host: int

    @classmethod
    def of(
        cls, cluster: Cluster, reserve: int = byte_quantity(RESERVE), host_reserve: int = byte_quantity(HOST_RESERVE)
    ) -> Room:
        """Returns the room on a cluster, less `reserve` bytes of each device and `host_reserve` of each machine."""
        device = cluster.accelerator.memory
        room = cls(device - reserve, (cluster.host_memory - host_reserve) // cluster.ranks_per_node)
        if min(room.device, room.host) < 1:
            raise ValueError(
                f"--reserve {reserve:,} and --host-reserve {host_reserve:,} bytes leave nothing of {cluster.name} with "
                f"{device:,} bytes a device and {cluster.host_memory:,} a machine"
            )
        return room

    def share(self, usage: Usage) -> float:
        """Used fraction of device or host, whichever is fuller. Above 1, the step does not fit."""
        return max(usage.device / self.device, usage.host / self.host)

    def limit(self, usage: Usage) -> str:
        """Returns "device" or "host", whichever is fuller."""
        return "device" if usage.device / self.device >= usage.host / self.host else "host"

    def comparison(self, usage: Usage) -> str:
        """Describes needed and available memory: "91.4 of 74.1 GiB on the device, 7.5 of 221.2 GiB on the host"."""
        pairs = ((usage.device, self.device, "device"), (usage.host, self.host, "host"))
        return ", ".join(
            f"{need / 2**30:,.1f} of {size / 2**30:,.1f} GiB on the {place}" for need, size, place in pairs
        )


# -- checkpoint policies -----------------------------------------------------------------------------------------------

# First without offload, then with offload and prefetch, then without prefetch. Each of these groups is ordered from
# the fastest policy, which needs the most memory, to the slowest.
POLICIES = (
    Checkpointing("none"),
    Checkpointing("none", tiled=True),
    Checkpointing("attention_output"),
    Checkpointing("layer"),
    Checkpointing("attention_output", offload=True),
    Checkpointing("layer", offload=True),
    Checkpointing("attention_output", offload=True, prefetch=False),
    Checkpointing("layer", offload=True, prefetch=False),
)


def fit_policy(policy: Checkpointing, job: Job, room: Room) -> Iterator[tuple[Job, Estimate]]:
    """Yields (job, its memory) under the policy itself, then under variants that store as many checkpoints as fit."""
    layers = job.model.layers

    @cache  # the bisections repeat policies
    def under(checkpointing: Checkpointing) -> tuple[Job, Estimate]:
        changed = replace(job, checkpointing=checkpointing)
        return changed, estimate(changed)

    def fits(checkpointing: Checkpointing, room: Room = room) -> bool:
        return room.share(under(checkpointing)[1]) <= 1

    # 1. All checkpoints, on the device or on the host.
    yield under(policy)
    if policy.policy == "none" or (not policy.offload and fits(policy)):
        return
    # 2. With offload: keep the checkpoints of as many of the last blocks as fit on the device. A host of unlimited size
    # leaves the device's memory as the only limit.
    if policy.offload:
        unlimited_host = replace(room, host=1 << 62)
        on_device = largest(0, layers, lambda n: fits(replace(policy, on_device=n), unlimited_host))
        if on_device == layers:
            return  # all blocks keep their checkpoints on the device: the policy without offload is the same
        policy = replace(policy, on_device=on_device or 0)
        yield under(policy)
    # 3. Fewer checkpoints.
    if not fits(policy):
        # The first variant keeps all inputs and drops attention outputs, the second drops inputs first. A dropped
        # output costs a recomputation of attention, a dropped input only one of the part after attention in the
        # previous block.
        for all_inputs in (True, False):
            variant = with_counts(policy, layers, all_inputs, fits)
            if variant is not None:
                yield under(variant)


def with_counts(
    policy: Checkpointing, layers: int, all_inputs: bool, fits: Callable[[Checkpointing], bool]
) -> Checkpointing | None:
    """Returns the policy with the most attention outputs that fit, and then the most inputs, or None if none fits.

    If `all_inputs`, all inputs are kept.
    """
    on_device, has_outputs = policy.on_device, policy.policy == "attention_output"

    def variant(outputs: int, inputs: int | None = None) -> Checkpointing:
        if all_inputs:
            inputs = layers
        elif inputs is None:
            # Blocks with checkpoints on the device always keep their inputs.
            # The number of inputs whose peak is lowest.
            inputs = on_device + best_input_count(layers - on_device, max(0, outputs - on_device))
        counts = {"outputs": None if outputs == layers else outputs} if has_outputs else {}
        return replace(policy, inputs=None if inputs == layers else inputs, **counts)

    # First choose the number of outputs, which is 0 under policy "layer", then of inputs, in the remaining memory.
    first, last = (1, layers) if has_outputs else (0, 0)
    outputs = largest(first, last, lambda n: fits(variant(n)))
    if outputs is None:
        return None
    inputs = variant(outputs).inputs
    if inputs is not None:
        inputs = largest(inputs, layers, lambda n: fits(variant(outputs, n)))
    return variant(outputs, inputs)


def largest(first: int, last: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest number from `first` to `last` that fits, by bisection; None if even `first` does not."""
    if not fits(first):
        return None
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if fits(middle) else (first, middle - 1)
    return first


# -- the longest sequence ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LongestFit:
    """The longest sequence that fits, its simulated memory, and the predicted memory of a million tokens more."""

    length: int
    memory: StepMemory
    longer: Usage

    @property
    def longer_length(self) -> int:
        return self.length + 1_000_000


def longest_fit(
    simulate: Callable[[int], StepMemory], predict: Callable[[int], Usage], room: Room, multiple: int, start: int
) -> LongestFit:
    """Returns the longest sequence that fits, among multiples of `multiple` tokens; `predict` is a faster `simulate`.

    Raises:
        DoesNotFitError: not even `multiple` tokens fit.
    """
    # 1. Search with the fast prediction.
    length = longest_predicted(predict, room, multiple, start)
    # 2. Confirm by simulation. While the sequence does not fit, shorten it in proportion.
    memory = simulate(length)
    while (used_share := room.share(memory)) > 1:
        if length == multiple:
            raise DoesNotFitError(f"not even {multiple:,} tokens fit: {room.comparison(memory)}")
        # Memory is nearly proportional to the length; half a percent less makes a second correction unlikely.
        length = max(multiple, int(length / used_share * 0.995) // multiple * multiple)
        memory = simulate(length)
    return LongestFit(length, memory, predict(length + 1_000_000))


def longest_predicted(predict: Callable[[int], Usage], room: Room, multiple: int, start: int) -> int:
    """Returns the longest tried length that fits by prediction, or `multiple` if none does."""
    # The secant method: memory is nearly linear in the length, so eight attempts suffice.
    first = max(multiple, start // 2 // multiple * multiple)
    usages = {length: predict(length) for length in (first, 2 * first)}  # the first two points of the secant
    for _ in range(8):
        # The line through the two lengths nearest to full crosses the room of the device, and that of the host.
        a, b = sorted(usages, key=lambda length: abs(room.share(usages[length]) - 1))[:2]
        at_a, at_b = usages[a], usages[b]
        full_lengths = list[float]()
        for size, bytes_a, bytes_b in ((room.device, at_a.device, at_b.device), (room.host, at_a.host, at_b.host)):
            slope = (bytes_b - bytes_a) / (b - a)
            if slope > 0:  # host memory may not depend on the length
                full_lengths.append(a + (size - bytes_a) / slope)
        guess = max(multiple, int(min(full_lengths, default=max(a, b))) // multiple * multiple)
        if guess in usages:
            break
        usages[guess] = predict(guess)
    return max((length for length, usage in usages.items() if room.share(usage) <= 1), default=multiple)


# -- advice ------------------------------------------------------------------------------------------------------------

# Steps whose estimated memory is more than this many times the room are not simulated.
#
# A long sequence has many chunks, and a simulation runs the ops of each.
SIMULATED_SHARE = 4
# Functions of a method's plan that an estimate needs.
FORMULAS = ("forward_memory", "backward_memory")


def check_simulated(job: Job, cluster: Cluster, room: Room, flag: str) -> None:
    """Refuses a step that by formulas needs far more memory than there is, because its simulation would take too long.

    The error names the `flag` of the sequence length, and has the `advice`.
    """
    if room.share(usage := estimate(job)) > SIMULATED_SHARE:
        raise DoesNotFitError(
            f"{flag} {job.length:,} does not fit {cluster.name}: {room.comparison(usage)}; {advice(job, cluster, room)}"
        )


def advice(job: Job, cluster: Cluster, room: Room) -> str:
    """Returns the nearest changes with which a step fits, by formulas, and how many accelerators would suffice."""
    # Another checkpoint policy, another method on as many ranks, or both if neither suffices alone; or fewer tokens.
    policy, method = fitting_policy(job, room), fitting_method(job, room)
    both = fitting_method(replace(job, checkpointing=POLICIES[-1], on_host=True), room)
    changes = list[str]()
    for other in [other for other in (policy, method) if other is not None] or [both]:
        if other is not None:
            usage = estimate(other)
            memory = f"{gib(usage.device)} GiB of a device, {gib(usage.host)} GiB of the host"
            changes.append(f"{change_text(job, other)} ({memory})")
    if (length := fewer_tokens(job, cluster, room)) is not None:
        changes.append(f"{length:,} tokens")
    accelerators = more_devices(job, cluster, room)
    return f"by formulas it fits with {', or with '.join(changes)}; {accelerators}" if changes else accelerators


def fitting_policy(job: Job, room: Room) -> Job | None:
    """Returns the job under the fastest policy that fits, with the optimizer where it is or else on the host."""
    for placed in [job] if job.on_host else [job, replace(job, on_host=True)]:
        for policy in POLICIES:
            for changed, usage in fit_policy(policy, placed, room):
                # A step that fits by formulas alone may not fit when simulated.
                if changed != job and room.share(usage) <= 1:
                    return changed
    return None


def fitting_method(job: Job, room: Room) -> Job | None:
    """Returns the job with another method that fits, on the job's mesh if one does, else on another of as many ranks.

    Of several, the one that leaves the most memory free.
    """
    # A hybrid would be simulated for every mesh.
    if is_hybrid(job.model):
        return None
    mesh = Mesh(**{"shard": 1, "ring": 1, "ulysses": 1, **job.axes})
    ranks, rows = mesh.replicas * mesh.ring * mesh.ulysses * mesh.tp, job.rows * mesh.replicas
    fitting = list[tuple[bool, float, int, Job]]()
    for i, candidate in enumerate(candidates(job.model.heads, ranks, rows, (), (mesh.tp,), (mesh.replicate,))):
        if candidate.mesh.shard == mesh.shard and not candidate.attention.method.missing(*FORMULAS):
            changed = replace(job, axes=candidate.mesh.axes, attention=candidate.attention)
            share = room.share(estimate(changed))
            if share <= 1 and candidate.attention != job.attention:
                fitting.append((candidate.mesh != mesh, share, i, changed))
    return min(fitting)[-1] if fitting else None


def fewer_tokens(job: Job, cluster: Cluster, room: Room) -> int | None:
    """Returns the longest shorter sequence that fits; None if there is none."""
    # 1,024 tokens for each rank or, in a short sequence, one.
    multiple = 1024 * cluster.ranks if job.length > 1024 * cluster.ranks else cluster.ranks

    def fits(count: int) -> bool:
        return room.share(estimate(replace(job, length=count * multiple))) <= 1

    shorter = (job.length - 1) // multiple
    count = largest(1, shorter, fits) if shorter else None
    return None if count is None else count * multiple


def more_devices(job: Job, cluster: Cluster, room: Room) -> str:
    """Returns the number of accelerators on which a step would fit, by formulas, as text."""
    # A method without a ring gets one, within its head axis if it has that.
    attention = AttentionChoice.of(job.method)
    if "ring" not in job.method.axes:
        attention = replace(attention, name="ring" if attention.name == "local" else f"{attention.name}+ring")
    # A larger ring reduces memory, down to the part that does not depend on the ring.
    for factor in (2**n for n in range(1, 33)):
        axes = {**job.axes, "ring": job.axes.get("ring", 1) * factor}
        usage = estimate(replace(job, attention=attention, axes=axes))
        if room.share(usage) <= 1:
            return (
                f"by formulas {cluster.ranks * factor:,} accelerators ({cluster.nodes * factor:,} nodes) would suffice "
                f"with {attention}: {gib(usage.device)} GiB of a device and {gib(usage.host)} GiB of the host for each"
            )
    return "by formulas no number of accelerators suffices: the memory that does not depend on their number is too much"


def change_text(job: Job, other: Job) -> str:
    changes = list[str]()
    if other.attention != job.attention or other.axes != job.axes:
        changes.append(f"{other.attention} on {Mesh(**other.axes)}")
    if other.checkpointing != job.checkpointing:
        is_stored = other.checkpointing.policy != "none"
        changes.append(f"checkpoints: {policy_text(other.checkpointing)}" if is_stored else "no checkpoints")
        changes += ["a chunked MLP"] if other.checkpointing.tiled else []
    if other.on_host != job.on_host:
        changes.append("the optimizer on the host")
    return " and ".join(changes)


def policy_text(policy: Checkpointing) -> str:
    """Describes a policy: "attention output of 25 blocks and 5 inputs on the host, but for the last block"."""

    def blocks(count: int) -> str:
        return f"{count} block{'' if count == 1 else 's'}"

    outputs = "" if policy.outputs is None else f" of {blocks(policy.outputs)}"
    inputs = "" if policy.inputs is None else f" and {policy.inputs} inputs"
    last_blocks = "block" if policy.on_device == 1 else blocks(policy.on_device)
    on_device = f", but for the last {last_blocks}" if policy.on_device else ""
    return f"{policy.policy.replace('_', ' ')}{outputs}{inputs}{' on the host' if policy.offload else ''}{on_device}"
