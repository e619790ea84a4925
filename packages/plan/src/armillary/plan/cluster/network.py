"""The network model: transfer times of concurrent sends, from the load of each port that they pass.

A send alone takes as long as in LogGP (Alexandrov et al., 1995), where `latency` is L, `message` 2 o (at both ends) and
1 / `bandwidth` G. Concurrent sends share the bandwidth of their ports.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as validated_dataclass

from armillary.attention.plans import Send
from armillary.data.console import BYTES_SUCH_AS, LARGEST, SUCH_AS, byte_quantity, quantity

Wiring = Literal["rank", "pair", "group"]
Port = tuple[str | int, ...]
"""A port's name: its level, its kind, and the rank, pair of ranks or group that has it."""


def number(value: Any) -> Any:
    """Converts text such as "64k" to a number. Refuses booleans, which pydantic accepts as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, such as {SUCH_AS}")
    return quantity(value) if isinstance(value, str) else value


def byte_number(value: Any) -> Any:
    """Converts text such as "80GB" to a number of bytes. Refuses booleans."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number of bytes, such as {BYTES_SUCH_AS}")
    return byte_quantity(value) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(number), Field(ge=1, le=LARGEST)]
Positive = Annotated[float, BeforeValidator(number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(number), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(number), Field(ge=0, le=1)]
Bytes = Annotated[int, BeforeValidator(byte_number), Field(ge=1, le=LARGEST)]
BytesPerSecond = Annotated[float, BeforeValidator(byte_number), Field(gt=0, allow_inf_nan=False)]
CHECKED = ConfigDict(extra="forbid")


@validated_dataclass(frozen=True, kw_only=True, config=CHECKED)
class Link:
    """A kind of connection between ranks.

    Args:
        bandwidth: bytes per second that large messages attain, in each direction.
        latency: seconds from the start of a send to the arrival of its first byte.
        per: "rank": each rank has one, into a switch. "pair": each pair of ranks has one (full mesh). "group": all
            ranks of a group share one, such as a node's network card or bus.
        disturbs: time that an exchange and a concurrent computation lose, as a fraction of the shorter one. 0: they
            overlap fully; 1: together they take as long as one after the other.
        message: seconds of software overhead per message, of sender and receiver together.
        crowding: exponent of the slowdown by concurrent peers: with p of them a port attains bandwidth / p ** crowding.
            0 for a non-blocking switch.
        turns: fraction of a collective's send that waits for the send in the opposite direction. 0: full duplex; 1: one
            after the other.
        buffer: size of the send buffer in bytes. The sender continues once its remaining bytes fit into the buffer.

    Raises:
        ValueError: a number outside its range, or an unknown value of `per`.
    """

    bandwidth: BytesPerSecond
    latency: NotNegative = 0.0
    per: Wiring = "rank"
    disturbs: Share = 0.0
    message: NotNegative = 0.0
    crowding: NotNegative = 0.0
    turns: Share = 0.0
    buffer: Annotated[int, BeforeValidator(byte_number), Field(ge=0)] = 0


@dataclass(frozen=True)
class Level:
    """One level of the network: groups of ranks, and the link that carries sends within a group.

    A send belongs to the lowest level that has both its source and its target in one group.

    Args:
        ranks: number of ranks of a group.
        card: if the link is per "group", number of ranks that share a network card; None: the group shares one bus.
    """

    name: str
    ranks: int
    link: Link
    card: int | None = None

    def ports(self, source: int, target: int) -> Iterator[Port]:
        """Yields the ports that a send occupies. Each port has the link's full bandwidth."""
        if self.link.per == "pair":
            yield (self.name, "pair", source, target)
        elif self.link.per == "group" and self.card is None:
            yield (self.name, "bus", source // self.ranks)
        else:
            ranks_per_port = (self.card or 1) if self.link.per == "group" else 1
            yield (self.name, "out", source // ranks_per_port)
            yield (self.name, "in", target // ranks_per_port)


class Delivery(NamedTuple):
    """Timing of one of several concurrent sends.

    Args:
        seconds: seconds from the start until the last byte has arrived.
        sending: seconds from the start until the sender may continue.
    """

    source: int
    target: int
    seconds: float
    sending: float
    link: Link

    def receive_and_compute(self, compute: float) -> float:
        """Seconds until the receiver has all bytes and has done a computation that starts with the send."""
        return self._overlap(self.seconds, compute)

    def send_and_compute(self, compute: float) -> float:
        """Seconds until the sender may continue and has done a computation that starts with the send."""
        return self._overlap(self.sending, compute)

    def _overlap(self, seconds: float, compute: float) -> float:
        # The longer of both, plus the fraction of the shorter one that contention for the device's resources adds.
        return max(compute, seconds) + self.link.disturbs * min(compute, seconds)


@dataclass
class Load:
    """The sends through one port. They share its bandwidth evenly, so small sends finish before large ones."""

    link: Link
    sizes: list[int] = field(default_factory=list[int])
    peers: set[int] = field(default_factory=set[int])

    @cached_property
    def sorted_sizes(self) -> tuple[list[int], list[int]]:
        """Returns (sizes in ascending order, their prefix sums). Cached, so read it after the last send is added."""
        sizes = sorted(self.sizes)
        return sizes, [0, *accumulate(sizes)]

    def seconds(self, size: int) -> float:
        """Seconds until the port has carried a send of `size` bytes, if all sends start together.

        By then it has carried all smaller sends, and `size` bytes of every other one.
        """
        sizes, sums = self.sorted_sizes
        smaller = bisect_right(sizes, size)
        carried_bytes = sums[smaller] + (len(sizes) - smaller) * size
        slowdown = len(self.peers) ** self.link.crowding if self.link.crowding else 1.0
        return carried_bytes * slowdown / self.link.bandwidth


def deliveries(levels: tuple[Level, ...], sends: Iterable[Send]) -> list[Delivery]:
    """Timing of sends that start together. The busiest port on its route determines the time of a send.

    Sends of 0 bytes, or from a rank to itself, are left out.

    Args:
        levels: levels of the network, from the smallest groups to all ranks.
    """
    # 1. The load of every port, and the ports on the route of every send.
    loads, routes = dict[Port, Load](), list[tuple[Send, Link, list[Load]]]()
    sends_by_rank, receives_by_rank = Counter[int](), Counter[int]()
    for send in sends:
        if send.source == send.target or not send.bytes:
            continue
        sends_by_rank[send.source] += 1
        receives_by_rank[send.target] += 1
        # The lowest level that has both ends in one group.
        level = next(level for level in levels if send.source // level.ranks == send.target // level.ranks)
        route = list[Load]()
        for port in level.ports(send.source, send.target):
            load = loads.setdefault(port, Load(level.link))
            load.sizes.append(send.bytes)
            if level.link.crowding:  # the peers of an input port are sources, those of any other port targets
                load.peers.add(send.source if "in" in port else send.target)
            route.append(load)
        routes.append((send, level.link, route))

    # 2. The time of every send: latency, software overhead of its messages, and the busiest port on its route.
    result = list[Delivery]()
    for send, link, route in routes:
        start = link.latency + link.message * max(sends_by_rank[send.source], receives_by_rank[send.target])
        busy = max(load.seconds(send.bytes) for load in route)
        # The sender waits for all bytes except those that its send buffer takes.
        unbuffered_fraction = max(0.0, 1 - link.buffer / send.bytes)
        result.append(Delivery(send.source, send.target, start + busy, start + busy * unbuffered_fraction, link))
    return result
