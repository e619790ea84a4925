"""The longest sequence that fits, and what holds a longer one back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from armillary.plan.cluster.cluster import Cluster
from armillary.plan.memory import StepMemory
from armillary.plan.memory.estimate import Estimate

RESERVE, HOST_RESERVE = "5GiB", "100GB"
"""Of each device and of each machine, for what is not torch's tensors, unless somebody knows better."""


@dataclass(frozen=True)
class Room:
    """Bytes that one rank may use.

    Args:
        device: of its accelerator, after what is not torch's tensors.
        host: of its share of the machine's memory.
    """

    device: int
    host: int

    @classmethod
    def of(cls, cluster: Cluster, reserve: int, host_reserve: int) -> Room:
        """Room on a cluster, where other things than tensors take so many bytes of each device and of each machine.

        Raises:
            ValueError: they take all.
        """
        room = cls(cluster.device_memory - reserve, (cluster.host_memory - host_reserve) // cluster.ranks_per_node)
        if min(room.device, room.host) < 1:
            raise ValueError(
                f"--reserve {reserve:,} and --host-reserve {host_reserve:,} bytes leave nothing of {cluster.name} with "
                f"{cluster.device_memory:,} bytes a device and {cluster.host_memory:,} a machine"
            )
        return room

    def share(self, found: StepMemory | Estimate) -> float:
        """How full the fuller of the two is; above 1, it does not fit."""
        return max(found.device / self.device, found.host / self.host)

    def limit(self, found: StepMemory | Estimate) -> str:
        """Which of the two is fuller."""
        return "device" if found.device / self.device >= found.host / self.host else "host"


Measure = Callable[[int], StepMemory]
"""From the length of a sequence to what a step takes."""

Outlook = Callable[[int], StepMemory | Estimate]
"""Likewise, quicker and less exact."""


@dataclass(frozen=True)
class Fit:
    """A length that fits, what it takes, and what another million tokens would take by the outlook."""

    length: int
    memory: StepMemory
    longer: StepMemory | Estimate

    @property
    def longer_length(self) -> int:
        return self.length + 1_000_000


def longest(measure: Measure, outlook: Outlook, room: Room, step: int, start: int) -> Fit:
    """The longest sequence that fits by the outlook, in multiples of `step` tokens, or a shorter one that really does.

    Args:
        measure: exact, and asked as little as possible.
        outlook: quicker, to look for the length with.
        start: where to begin.

    Raises:
        ValueError: not even one `step` fits.
    """
    length = search(outlook, room, step, start)
    memory = measure(length)
    while (share := room.share(memory)) > 1:
        if length == step:
            raise ValueError(f"not even {step:,} tokens fit: {missing(memory, room)}")
        length = max(step, int(length / share * 0.995) // step * step)
        memory = measure(length)
    return Fit(length, memory, outlook(length + 1_000_000))


def search(outlook: Outlook, room: Room, step: int, start: int, most: int = 8) -> int:
    """Where the room is full. Memory grows with the length along a line, nearly: two lengths tell where to look next.

    Args:
        most: how often to look.
    """
    least = max(step, start // 2 // step * step)
    known = {length: outlook(length) for length in (least, 2 * least)}
    for _ in range(most):
        guess = max(step, solve(known, room) // step * step)
        if guess in known:
            break
        known[guess] = outlook(guess)
    fitting = [length for length, found in known.items() if room.share(found) <= 1]
    return max(fitting, default=step)


def solve(known: Mapping[int, StepMemory | Estimate], room: Room) -> int:
    """Where the line through the two nearest to full meets it, for whichever of device and host is met first."""
    a, b = sorted(known, key=lambda length: abs(room.share(known[length]) - 1))[:2]
    x, y = known[a], known[b]
    reached: list[float] = []
    for have, first, second in ((room.device, x.device, y.device), (room.host, x.host, y.host)):
        slope = (second - first) / (b - a)
        if slope > 0:
            reached.append(a + (have - first) / slope)
    return int(min(reached, default=max(a, b)))


def missing(memory: StepMemory | Estimate, room: Room) -> str:
    """What is needed of what there is."""
    pairs = ((memory.device, room.device, "device"), (memory.host, room.host, "host"))
    return ", ".join(f"{need / 2**30:.1f} of {have / 2**30:.1f} GiB on the {where}" for need, have, where in pairs)
