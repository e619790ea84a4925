"""`Room`: memory that a run may use; the longest sequence that fits into it, and the accelerators for a longer one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from armillary.data.console.quantity import gib, quantity
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.memory import Job, StepMemory
from armillary.plan.memory.estimate import AttentionChoice, Estimate, estimate

RESERVE, HOST_RESERVE = "5GiB", "100GB"
"""Default memory of a device and of a machine that is not available to torch's tensors."""

SIMULATED_SHARE = 4
"""A step with a larger estimated share of the room is not simulated: simulations take longer the more chunks it has."""

Usage = StepMemory | Estimate
Simulate = Callable[[int], StepMemory]
"""Simulates a step with a sequence of this length."""
Predict = Callable[[int], Usage]
"""A faster and less exact `Simulate`."""


class DoesNotFitError(Exception):
    """A step, or every sequence length, needs more memory than there is. The input is valid: the exit code is 1."""


@dataclass(frozen=True)
class Room:
    """Bytes that one rank may use of its device, and of its share of the machine's memory."""

    device: int
    host: int

    @classmethod
    def of(cls, cluster: Cluster, reserve: int = quantity(RESERVE), host_reserve: int = quantity(HOST_RESERVE)) -> Room:
        """Room on a cluster, with `reserve` bytes of each device and `host_reserve` bytes of each machine left out.

        Raises:
            ValueError: the reserves leave nothing.
        """
        room = cls(cluster.device_memory - reserve, (cluster.host_memory - host_reserve) // cluster.ranks_per_node)
        if min(room.device, room.host) < 1:
            raise ValueError(
                f"--reserve {reserve:,} and --host-reserve {host_reserve:,} bytes leave nothing of {cluster.name} with "
                f"{cluster.device_memory:,} bytes a device and {cluster.host_memory:,} a machine"
            )
        return room

    def share(self, usage: Usage) -> float:
        """Used share of the device or the host, whichever is fuller; above 1 it does not fit."""
        return max(usage.device / self.device, usage.host / self.host)

    def limit(self, usage: Usage) -> str:
        """The fuller of "device" and "host"."""
        return "device" if usage.device / self.device >= usage.host / self.host else "host"

    def comparison(self, usage: Usage) -> str:
        """Needed and available memory, such as "91.4 of 74.1 GiB on the device, 7.5 of 221.2 GiB on the host"."""
        pairs = ((usage.device, self.device, "device"), (usage.host, self.host, "host"))
        return ", ".join(
            f"{need / 2**30:,.1f} of {size / 2**30:,.1f} GiB on the {place}" for need, size, place in pairs
        )


def more_devices(job: Job, cluster: Cluster, room: Room) -> str:
    """Advice for a step that does not fit: the number of accelerators that suffice, by formulas.

    Doubles the ring until the step fits. A method without a ring gets one around it.
    """
    attention = job.attention
    assert isinstance(attention, AttentionChoice)
    if "ring" not in attention.method.axes:
        attention = replace(attention, name="ring" if attention.name == "local" else f"{attention.name}+ring")
    # Memory falls monotonically with the ring, up to the part that does not depend on its size.
    for factor in (2**n for n in range(1, 33)):
        axes = {**job.axes, "ring": job.axes.get("ring", 1) * factor}
        usage = estimate(replace(job, attention=attention, axes=axes))
        if room.share(usage) <= 1:
            return (
                f"by formulas {cluster.ranks * factor:,} accelerators ({cluster.nodes * factor:,} nodes) would suffice "
                f"with {attention}: {gib(usage.device)} GiB of a device and {gib(usage.host)} GiB of the host for each"
            )
    return "by formulas no number of accelerators suffices: what does not shrink with their number is too much"


def check_simulated(job: Job, cluster: Cluster, room: Room, flag: str) -> None:
    """Refuses a step that needs far more memory than there is, by formulas: simulating it would take too long.

    Args:
        flag: flag of the sequence length.

    Raises:
        DoesNotFitError: with the number of accelerators that would suffice.
    """
    if room.share(usage := estimate(job)) > SIMULATED_SHARE:
        raise DoesNotFitError(
            f"{flag} {job.length:,} does not fit {cluster.name}: {room.comparison(usage)}; "
            f"{more_devices(job, cluster, room)}"
        )


@dataclass(frozen=True)
class LongestFit:
    """The longest sequence that fits.

    Args:
        length: its number of tokens.
        memory: its memory, simulated.
        longer: predicted memory of a sequence with a million tokens more.
    """

    length: int
    memory: StepMemory
    longer: Usage

    @property
    def longer_length(self) -> int:
        return self.length + 1_000_000


def longest_fit(simulate: Simulate, predict: Predict, room: Room, step: int, start: int) -> LongestFit:
    """The longest sequence that fits, in multiples of `step` tokens.

    Searches by prediction, then confirms with as few simulations as possible, each of a slightly shorter sequence.

    Args:
        start: length to start the search with.

    Raises:
        DoesNotFitError: not even `step` tokens fit.
    """
    # 1. Search with the fast prediction.
    length = longest_predicted(predict, room, step, start)
    # 2. Confirm by simulation, and shorten in proportion while it does not fit.
    memory = simulate(length)
    while (used_share := room.share(memory)) > 1:
        if length == step:
            raise DoesNotFitError(f"not even {step:,} tokens fit: {room.comparison(memory)}")
        # Memory is nearly proportional to the length; half a percent less makes a second correction unlikely.
        length = max(step, int(length / used_share * 0.995) // step * step)
        memory = simulate(length)
    return LongestFit(length, memory, predict(length + 1_000_000))


def longest_predicted(predict: Predict, room: Room, step: int, start: int, attempts: int = 8) -> int:
    """The length at which the room is full by prediction, found by the secant method.

    Memory is nearly linear in the length, so a few attempts suffice.
    """
    first = max(step, start // 2 // step * step)
    usages = {length: predict(length) for length in (first, 2 * first)}  # the first two points of the secant
    for _ in range(attempts):
        guess = max(step, _full_length(usages, room) // step * step)
        if guess in usages:
            break
        usages[guess] = predict(guess)
    return max((length for length, usage in usages.items() if room.share(usage) <= 1), default=step)


def _full_length(usages: Mapping[int, Usage], room: Room) -> int:
    """Length at which device or host is full, on the line through the two lengths nearest to that."""
    a, b = sorted(usages, key=lambda length: abs(room.share(usages[length]) - 1))[:2]
    at_a, at_b = usages[a], usages[b]
    lengths: list[float] = []
    for size, first, second in ((room.device, at_a.device, at_b.device), (room.host, at_a.host, at_b.host)):
        slope = (second - first) / (b - a)
        if slope > 0:  # host memory may not depend on the length
            lengths.append(a + (size - first) / slope)
    return int(min(lengths, default=max(a, b)))
