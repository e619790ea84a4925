"""`Room`: memory that a run may use. Also finds the longest sequence that fits, and how many accelerators suffice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from armillary.data.console import byte_quantity, gib
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.memory import Job, StepMemory
from armillary.plan.memory.estimate import AttentionChoice, Estimate, estimate

RESERVE, HOST_RESERVE = "5GiB", "100GB"
"""Default reserves of a device and of a machine: memory that is not available to torch's tensors."""

Usage = StepMemory | Estimate
"""Memory of a step, simulated or estimated."""
Simulate = Callable[[int], StepMemory]
"""Simulates a step with a sequence of this length."""
Predict = Callable[[int], Usage]
"""A faster and less exact `Simulate`."""


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
        """Returns the room on a cluster, less `reserve` bytes of each device and `host_reserve` bytes of each machine.

        Raises:
            ValueError: the reserves leave no memory.
        """
        room = cls(cluster.device_memory - reserve, (cluster.host_memory - host_reserve) // cluster.ranks_per_node)
        if min(room.device, room.host) < 1:
            raise ValueError(
                f"--reserve {reserve:,} and --host-reserve {host_reserve:,} bytes leave nothing of {cluster.name} with "
                f"{cluster.device_memory:,} bytes a device and {cluster.host_memory:,} a machine"
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


def more_devices(job: Job, cluster: Cluster, room: Room) -> str:
    """Returns the number of accelerators on which a step would fit, by formulas, as text.

    Doubles the ring until the step fits. A method without a ring gets one, within its head axis if it has that.
    """
    attention = job.attention
    assert isinstance(attention, AttentionChoice)
    if "ring" not in attention.method.axes:
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


@dataclass(frozen=True)
class LongestFit:
    """The longest sequence that fits.

    Args:
        length: number of tokens of the sequence.
        memory: simulated memory of its step.
        longer: predicted memory for a sequence of a million tokens more (`longer_length`).
    """

    length: int
    memory: StepMemory
    longer: Usage

    @property
    def longer_length(self) -> int:
        return self.length + 1_000_000


def longest_fit(simulate: Simulate, predict: Predict, room: Room, multiple: int, start: int) -> LongestFit:
    """Returns the longest sequence that fits, among lengths that are multiples of `multiple` tokens.

    Searches by prediction, then simulates the length, and shorter ones until one fits.

    Args:
        start: length at which the search starts.

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


def longest_predicted(predict: Predict, room: Room, multiple: int, start: int, attempts: int = 8) -> int:
    """Returns the longest tried length that fits by prediction, or `multiple` if none does.

    The secant method finds lengths that fill the room. Memory is nearly linear in the length, so a few attempts
    suffice.
    """
    first = max(multiple, start // 2 // multiple * multiple)
    usages = {length: predict(length) for length in (first, 2 * first)}  # the first two points of the secant
    for _ in range(attempts):
        guess = max(multiple, _full_length(usages, room) // multiple * multiple)
        if guess in usages:
            break
        usages[guess] = predict(guess)
    return max((length for length, usage in usages.items() if room.share(usage) <= 1), default=multiple)


def _full_length(usages: Mapping[int, Usage], room: Room) -> int:
    """Returns the length at which device or host is full, on the line through the two lengths nearest to it."""
    a, b = sorted(usages, key=lambda length: abs(room.share(usages[length]) - 1))[:2]
    at_a, at_b = usages[a], usages[b]
    lengths: list[float] = []
    for size, first, second in ((room.device, at_a.device, at_b.device), (room.host, at_a.host, at_b.host)):
        slope = (second - first) / (b - a)
        if slope > 0:  # host memory may not depend on the length
            lengths.append(a + (size - first) / slope)
    return int(min(lengths, default=max(a, b)))
