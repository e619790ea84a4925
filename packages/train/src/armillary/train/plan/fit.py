"""The longest sequence that fits, and what holds a longer one back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from armillary.core import Cluster
from armillary.train.memory import StepMemory


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
    def of(cls, cluster: Cluster, reserve: int) -> Room:
        """Room on a cluster, where `reserve` bytes of each device are taken by other things than tensors."""
        return cls(cluster.device_memory - reserve, cluster.host_memory_per_rank)

    def share(self, found: StepMemory) -> float:
        """How full the fuller of the two is; above 1, it does not fit."""
        return max(found.device / self.device, found.host / self.host)

    def limit(self, found: StepMemory) -> str:
        """Which of the two is fuller."""
        return "device" if found.device / self.device >= found.host / self.host else "host"


@dataclass(frozen=True)
class Fit:
    """A length that fits, what it takes, and what another million tokens would take."""

    length: int
    memory: StepMemory
    longer: StepMemory
    tried: int

    @property
    def longer_length(self) -> int:
        return self.length + 1_000_000


def longest(measure: Callable[[int], StepMemory], room: Room, step: int, start: int, most: int = 5) -> Fit:
    """The longest sequence, in multiples of `step` tokens, that fits the room to within a percent.

    Memory grows linearly with the length but for small steps, so two lengths tell where to look.

    Args:
        measure: from a length to what it takes.
        start: where to begin.
        most: how often to measure on the way.

    Raises:
        ValueError: not even one `step` fits.
    """
    least = max(step, start // 2 // step * step)
    known = {length: measure(length) for length in (least, 2 * least)}
    for _ in range(most):
        guess = max(step, solve(known, room) // step * step)
        if guess in known:
            break
        known[guess] = measure(guess)
        if 0.99 <= room.share(known[guess]) <= 1:
            break
    fitting = [length for length, found in known.items() if room.share(found) <= 1]
    if not fitting:
        least = known[min(known)]
        raise ValueError(
            f"not even {min(known):,} tokens fit: {least.device / 2**30:.1f} of {room.device / 2**30:.1f} GiB on the "
            f"device, {least.host / 2**30:.1f} of {room.host / 2**30:.1f} GiB on the host"
        )
    best = max(fitting)
    return Fit(best, known[best], measure(best + 1_000_000), len(known) + 1)


def solve(known: dict[int, StepMemory], room: Room) -> int:
    """Where the line through the two nearest to full meets it, for whichever of device and host is met first."""
    a, b = sorted(known, key=lambda length: abs(room.share(known[length]) - 1))[:2]
    reached: list[float] = []
    for have, x, y in (
        (room.device, known[a].device, known[b].device),
        (room.host, known[a].host, known[b].host),
    ):
        slope = (y - x) / (b - a)
        if slope > 0:
            reached.append(a + (have - x) / slope)
    return int(min(reached, default=max(a, b)))
