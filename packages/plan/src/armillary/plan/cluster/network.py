"""How long sends take that are under way together: arithmetic on what each wire has to carry."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple

from armillary.core.network import Send

Wiring = Literal["rank", "pair", "group"]
Port = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What ranks reach each other by.

    Args:
        bandwidth: bytes a second, each way, that large messages attain.
        latency: seconds from the start of a send to the arrival of its first byte.
        per: who has such a link: each "rank", into a switch; each "pair" of ranks (a full mesh); or a "group" of ranks
            together, which share it: the network card of a node, or the bus within one.
        disturbs: what an exchange and computation beside it take from each other, as a share of the shorter one: 0
            where one hides the other, 1 where it is as if they came one after the other.
        message: seconds that each message takes of its sender, and of its receiver, besides: for software.
        crowding: a port that serves p others at once attains bandwidth / p ** crowding: 0 where a switch does the work.
        turns: of what two ranks send each other in a collective, the share that one way waits for the other: 0 where
            both go at once, 1 where one goes after the other.
        buffer: bytes that a sender hands over at once when the receiver is ready: it does not wait for their arrival.

    Raises:
        ValueError: no bandwidth, a negative number, or other wiring.
    """

    bandwidth: float
    latency: float = 0.0
    per: Wiring = "rank"
    disturbs: float = 0.0
    message: float = 0.0
    crowding: float = 0.0
    turns: float = 0.0
    buffer: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < inf:
            raise ValueError(f"bandwidth={self.bandwidth} must be above 0 bytes a second, and finite")
        for name in ("latency", "disturbs", "message", "crowding", "turns", "buffer"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)} must not be below 0, and finite")
        for name in ("disturbs", "turns"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)} must not be above 1")
        if self.per not in ("rank", "pair", "group"):
            raise ValueError(f"per={self.per!r}; known: rank, pair, group")


@dataclass(frozen=True)
class Level:
    """Ranks in groups, that reach each other by `link` where no smaller group has both.

    Args:
        ranks: of each group.
        card: of a link for each "group": so many ranks share a card, in and out; None: all of the group share a bus.
    """

    name: str
    ranks: int
    link: Link
    card: int | None = None

    def ports(self, source: int, target: int) -> Iterator[Port]:
        """What a send takes up; each of them has the link's bandwidth."""
        if self.link.per == "pair":
            yield (self.name, "pair", source, target)
        elif self.link.per == "group" and self.card is None:
            yield (self.name, "bus", source // self.ranks)
        else:
            sharing = (self.card or 1) if self.link.per == "group" else 1
            yield (self.name, "out", source // sharing)
            yield (self.name, "in", target // sharing)


class Delivery(NamedTuple):
    """One of several sends that are under way together: how long it takes, how long its sender, and over which link."""

    source: int
    target: int
    seconds: float
    sending: float
    link: Link

    def beside(self, compute: float) -> float:
        """Seconds of it and of computation that begins with it: the longer, and what they take from each other."""
        return self._beside(self.seconds, compute)

    def sending_beside(self, compute: float) -> float:
        """The same, for its sender."""
        return self._beside(self.sending, compute)

    def _beside(self, seconds: float, compute: float) -> float:
        return max(compute, seconds) + self.link.disturbs * min(compute, seconds)


@dataclass
class Load:
    """What a port has to carry: sends share it evenly, so that small ones are through before large ones."""

    link: Link
    sizes: list[int] = field(default_factory=list[int])
    peers: set[int] = field(default_factory=set[int])

    @cached_property
    def ordered(self) -> tuple[list[int], list[int]]:
        """Sizes from the smallest, and the sums of the first none, one, two, ... Not before all are there."""
        sizes = sorted(self.sizes)
        return sizes, [0, *accumulate(sizes)]

    def seconds(self, size: int) -> float:
        """Until a send of so many bytes is through, if all begin together."""
        sizes, sums = self.ordered
        smaller = bisect_right(sizes, size)
        carried = sums[smaller] + (len(sizes) - smaller) * size
        crowd = len(self.peers) ** self.link.crowding if self.link.crowding else 1.0
        return carried * crowd / self.link.bandwidth


def deliveries(levels: tuple[Level, ...], sends: Iterable[Send]) -> list[Delivery]:
    """How long each of some sends takes that begin together: as long as at the busiest port on its way.

    Args:
        levels: from the smallest groups to all ranks.
    """
    loads, routes = dict[Port, Load](), list[tuple[Send, Link, list[Load]]]()
    sent, received = Counter[int](), Counter[int]()
    for send in sends:
        if send.source == send.target or not send.bytes:
            continue
        sent[send.source] += 1
        received[send.target] += 1
        level = next(level for level in levels if send.source // level.ranks == send.target // level.ranks)
        route = list[Load]()
        for port in level.ports(send.source, send.target):
            load = loads.setdefault(port, Load(level.link))
            load.sizes.append(send.bytes)
            if level.link.crowding:
                load.peers.add(send.source if "in" in port else send.target)
            route.append(load)
        routes.append((send, level.link, route))
    return [
        _delivery(
            send,
            link,
            link.latency + link.message * max(sent[send.source], received[send.target]),
            max(load.seconds(send.bytes) for load in route),
        )
        for send, link, route in routes
    ]


def _delivery(send: Send, link: Link, before: float, busy: float) -> Delivery:
    unbuffered = max(0.0, 1 - link.buffer / send.bytes)
    return Delivery(send.source, send.target, before + busy, before + busy * unbuffered, link)
