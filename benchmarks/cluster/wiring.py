"""Hosts and wires of a `Cluster`, and the path between each two ranks, as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from armillary.plan import Cluster


class End(NamedTuple):
    """An interface of a host."""

    host: int
    name: str


class Wire(NamedTuple):
    """Two joined interfaces with a bandwidth in bytes a second per direction."""

    one: End
    other: End
    bandwidth: float


@dataclass(frozen=True)
class Wiring:
    """Hosts and their wires: first nodes (each a switch), then ranks, then the spine.

    Raises:
        ValueError: links that wires and switches cannot represent.
    """

    cluster: Cluster

    def __post_init__(self) -> None:
        cluster = self.cluster
        if cluster.switch or cluster.within.per == "group" or cluster.between.per == "pair":
            raise ValueError(
                f"{cluster.name}: within per {cluster.within.per}, between per {cluster.between.per}, switches of "
                f"{cluster.switch_ranks} ranks; can be emulated: within per rank or pair, between per rank or group, "
                "one switch in a node"
            )
        if cluster.between.per == "group" and cluster.within.per == "pair":
            raise ValueError(f"{cluster.name}: a card for each node needs a port for each rank within, not pairs")

    @property
    def spine(self) -> int:
        """The host that connects the nodes."""
        return self.cluster.nodes + self.cluster.ranks

    def host(self, rank: int) -> int:
        return self.cluster.nodes + rank

    def node(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_node

    def address(self, rank: int) -> str:
        return f"10.78.{rank // 250}.{rank % 250 + 1}"

    def wires(self) -> Iterator[Wire]:
        within, between, ranks = self.cluster.within, self.cluster.between, range(self.cluster.ranks)
        for rank in ranks:
            host = self.host(rank)
            if within.per == "rank":
                yield Wire(End(host, "within"), End(self.node(rank), f"port{rank}"), within.bandwidth)
            else:
                peers = (r for r in ranks if r > rank and self.node(r) == self.node(rank))
                yield from (
                    Wire(End(host, f"pair{r}"), End(self.host(r), f"pair{rank}"), within.bandwidth) for r in peers
                )
            if between.per == "rank" and self.cluster.nodes > 1:
                yield Wire(End(host, "card"), End(self.spine, f"port{rank}"), between.bandwidth)
        if between.per == "group" and self.cluster.nodes > 1:
            for node in range(self.cluster.nodes):
                yield Wire(End(node, "card"), End(self.spine, f"port{node}"), between.bandwidth)

    def way(self, source: int, target: int) -> Iterator[End]:
        """The ends of wires through which a message from `source` to `target` leaves, in order."""
        yield End(self.host(source), self.interface(source, target))
        source_node, target_node = self.node(source), self.node(target)
        if source_node == target_node and self.cluster.within.per == "rank":
            yield End(source_node, f"port{target}")
        elif source_node != target_node and self.cluster.between.per == "rank":
            yield End(self.spine, f"port{target}")
        elif source_node != target_node:
            yield from (
                End(source_node, "card"),
                End(self.spine, f"port{target_node}"),
                End(target_node, f"port{target}"),
            )

    def crossing(self) -> Mapping[End, Sequence[tuple[int, int]]]:
        """All (source, target) pairs whose messages leave through each end of a wire."""
        crossing_sends = defaultdict[End, list[tuple[int, int]]](list)
        for source, target in permutations(range(self.cluster.ranks), 2):
            for end in self.way(source, target):
                crossing_sends[end].append((source, target))
        return crossing_sends

    def interface(self, rank: int, other: int) -> str:
        """The interface through which `rank` reaches `other`."""
        if self.node(rank) == self.node(other):
            return "within" if self.cluster.within.per == "rank" else f"pair{other}"
        return "card" if self.cluster.between.per == "rank" else "within"
