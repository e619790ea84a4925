"""The network model: transfer times of concurrent sends, from the load of each port that they pass.

A send alone takes as long as in LogGP (Alexandrov et al., 1995), where `latency` is L, `message` 2 o (at both ends) and
1 / `bandwidth` G. Concurrent sends share the bandwidth of their ports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as validated_dataclass

from armillary.data.console import BYTES_SUCH_AS, LARGEST, SUCH_AS, byte_quantity, quantity

Wiring = Literal["rank", "pair", "group"]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    """One level of the network: groups of `ranks` ranks, and the link that carries sends within a group.

    A send belongs to the lowest level that has both its source and its target in one group. If the link is per "group",
    `card` ranks share a network card; with None the group shares one bus.
    """

    name: str
    ranks: int
    link: Link
    card: int | None = None

    @property
    def is_shared(self) -> bool:
        """True if one port carries both ends of a send: the link of a pair of ranks, or a bus."""
        return self.link.per == "pair" or (self.link.per == "group" and self.card is None)

    def ports(self, source: Integers, target: Integers) -> tuple[Integers, Integers]:
        """Numbers of the (output, input) ports that sends occupy. Each port has the link's full bandwidth."""
        if self.is_shared:
            port = source * self.ranks + target if self.link.per == "pair" else source // self.ranks
            return port, port
        ranks_per_port = (self.card or 1) if self.link.per == "group" else 1
        return source // ranks_per_port, target // ranks_per_port


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


class Deliveries(NamedTuple):
    """Timing of many sends: the fields of `Delivery` as arrays, and the index of the level whose link carries each."""

    source: Integers
    target: Integers
    seconds: Floats
    sending: Floats
    level: Integers


def concurrent_seconds(transfer: Any, compute: Any, disturbs: Any) -> Any:
    """Seconds until a transfer and a computation that start together are both done, as numbers or arrays."""
    # The longer of both, plus the fraction of the shorter one that contention for the device's resources adds.
    return np.maximum(compute, transfer) + disturbs * np.minimum(compute, transfer)


def deliveries(levels: Sequence[Level], sends: Integers, batch: Integers) -> Deliveries:
    """Timing of sends (source, target, bytes >= 1). Sends of one `batch` start together; batches do not meet.

    `levels` are those of the network, from the smallest groups to all ranks.
    """
    source, target, size = sends.T
    # The lowest level that has both ends in one group: argmax returns the first of several equal values.
    level = np.argmax([source // each.ranks == target // each.ranks for each in levels], axis=0)

    def link(name: str) -> Floats:
        return np.array([getattr(each.link, name) for each in levels])[level]

    def busy_seconds(ports: Sequence[Integers], peer: Integers) -> Floats:
        # Ports of different batches and levels are different.
        port = np.choose(level, ports)
        port += (batch * len(levels) + level) * (port.max(initial=0) + 1)
        slowdown = np.ones(len(size))
        if any(crowding := link("crowding").tolist()):
            # Python's power, because numpy's may differ in the last bit.
            counts = peer_counts(port, peer).tolist()
            slowdown = np.array([count**exponent for count, exponent in zip(counts, crowding, strict=True)])
        return carried_bytes(port, size) * slowdown / link("bandwidth")

    # 1. The time for which the send's output and input port are busy, of which the longer one counts. Peers of an
    # output port are targets, of an input port sources.
    outputs, inputs = zip(*(each.ports(source, target) for each in levels), strict=True)
    is_shared = np.array([each.is_shared for each in levels])[level]
    busy = np.maximum(busy_seconds(outputs, target), busy_seconds(inputs, np.where(is_shared, target, source)))
    # 2. The time of every send: latency, software overhead of its messages, and the busiest port on its route.
    ranks = levels[-1].ranks
    messages = np.maximum(frequency(batch * ranks + source), frequency(batch * ranks + target))
    start = link("latency") + link("message") * messages
    # The sender waits for all bytes except those that its send buffer takes.
    unbuffered_fraction = np.maximum(0.0, 1 - link("buffer") / size)
    return Deliveries(source, target, start + busy, start + busy * unbuffered_fraction, level)


def carried_bytes(port: Integers, size: Integers) -> Integers:
    """For each send, the bytes that its port has carried when the send is done, if all sends start together."""
    # Sends share the bandwidth of their port evenly, so small sends finish before large ones: the port has then carried
    # all smaller sends, and as many bytes of every larger one.
    order = np.lexsort((size, port))
    port, size = port[order], size[order]
    sums, first, end = np.cumsum(size), np.searchsorted(port, port), np.searchsorted(port, port, "right")
    smaller_sends = sums - (sums - size)[first]  # and the send itself
    result = np.empty_like(size)
    result[order] = smaller_sends + (end - 1 - np.arange(len(size))) * size
    return result


def peer_counts(port: Integers, peer: Integers) -> Integers:
    """For each send, the number of different peers of its port."""
    ranks = peer.max(initial=0) + 1
    ports = np.unique(port * ranks + peer) // ranks
    return np.searchsorted(ports, port, "right") - np.searchsorted(ports, port)


def frequency(values: Integers) -> Integers:
    """For each value, the number of times that it occurs."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return counts[index]
