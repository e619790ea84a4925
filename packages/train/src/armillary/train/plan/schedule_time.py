"""How long a schedule takes on a cluster: each rank waits for what it computes, sends and receives, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from armillary.attention.schedule import Move, Step
from armillary.core import Cluster, Delivery, Send

FORWARD, BACKWARD = 4, 10
"""Floating-point operations for each visible (query, key) pair of a head, by head dim: two products, and five."""


@dataclass(frozen=True)
class Span:
    """Seconds, and what they are spent on.

    Args:
        compute: kernels, as if nothing were sent.
        exposed: waiting for exchanges, and computing more slowly beside them.
        overhead: what steps cost beside kernels.
        exchange: all exchanges, hidden or not: no part of the sum.
    """

    compute: float = 0.0
    exposed: float = 0.0
    overhead: float = 0.0
    exchange: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.exposed + self.overhead

    def __add__(self, other: Span) -> Span:
        return Span(
            self.compute + other.compute,
            self.exposed + other.exposed,
            self.overhead + other.overhead,
            self.exchange + other.exchange,
        )


def spent(steps: Sequence[Step], cluster: Cluster, seconds_per_pair: float, copies: int = 1) -> Span:
    """One pass of attention, by all ranks together, until the last is through.

    A rank goes on to its next step when it has computed, and all that it sends and receives has arrived; sends begin
    when both ends are there.

    Args:
        steps: of the forward or of the backward of a schedule over P ranks.
        seconds_per_pair: that a rank takes for each visible (query, key) pair of a head.
        copies: of the schedule that run side by side, on ranks 0..P-1, P..2P-1 and so on, and share wires.
    """
    ranks, overhead = cluster.ranks // copies, cluster.accelerator.step
    clock, computing, exchange = [0.0] * ranks, [0.0] * ranks, 0.0
    for step in steps:
        compute = [pairs * seconds_per_pair + overhead for pairs in step.pairs] or [0.0] * ranks
        under_way = sent(step.moves, cluster, copies)
        clock = after(clock, compute, under_way)
        computing = [a + b for a, b in zip(computing, compute, strict=True)]
        exchange += max((delivery.seconds for delivery in under_way), default=0.0)
    overheads = overhead * sum(bool(step.pairs) for step in steps)
    busiest = max(computing, default=0.0)
    return Span(busiest - overheads, max(clock, default=0.0) - busiest, overheads, exchange)


def after(clock: Sequence[float], compute: Sequence[float], under_way: Iterable[Delivery]) -> list[float]:
    """When each rank is through with a step that it begins at `clock`."""
    ends = [start + seconds for start, seconds in zip(clock, compute, strict=True)]
    for send in under_way:
        start = max(clock[send.source], clock[send.target])
        for rank in (send.source, send.target):
            ends[rank] = max(ends[rank], start + send.beside(compute[rank]))
    return ends


@lru_cache(maxsize=4096)  # steps of a ring, and stages of heads, are much alike
def sent(moves: tuple[Move, ...], cluster: Cluster, copies: int) -> list[Delivery]:
    """How long what the first of several groups of ranks sends takes, while the others send the same."""
    ranks, sends = cluster.ranks // copies, [send for move in moves for send in in_rounds(move)]
    firsts = range(0, copies * ranks, ranks)
    every = cluster.deliveries(Send(a + first, b + first, size) for first in firsts for a, b, size in sends)
    slowest = dict[tuple[int, int], Delivery]()
    for found in every:
        ends = found.source % ranks, found.target % ranks
        if ends not in slowest or found.seconds > slowest[ends].seconds:
            slowest[ends] = found._replace(source=ends[0], target=ends[1])
    late = latencies(moves, cluster)
    return [found._replace(seconds=found.seconds + late.get(ends, 0.0)) for ends, found in slowest.items()]


def in_rounds(move: Move) -> Iterator[Send]:
    """A move's sends; of an all-gather, which its schedule gives as the sum of them, each round's."""
    for send in move.sends:
        rounds = others(move, send.source) if move.kind == "all_gather" else 1
        yield from [send._replace(bytes=send.bytes // rounds)] * rounds


def latencies(moves: Iterable[Move], cluster: Cluster) -> dict[tuple[int, int], float]:
    """What an all-gather takes longer than its bytes do: each of its rounds waits for the one before."""
    late = dict[tuple[int, int], float]()
    for move in moves:
        if move.kind == "all_gather":
            slowest = max(cluster.transit([send._replace(bytes=1)]) for send in move.sends)
            for send in move.sends:
                late[send.source, send.target] = (others(move, send.source) - 1) * slowest
    return late


def others(move: Move, rank: int) -> int:
    """Ranks on the ring of an all-gather beside this one."""
    following = {send.source: send.target for send in move.sends}
    count, at = 0, following[rank]
    while at != rank:
        count, at = count + 1, following[at]
    return count


@lru_cache(maxsize=1024)
def around(cluster: Cluster, size: float) -> float:
    """Seconds that all-gathering a tensor of `size` bytes over all ranks takes, or reduce-scattering it.

    As NCCL does it: rings that pass each node's ranks and cross from node to node at each of them in turn, so that all
    cards are used.
    """
    n, each = cluster.ranks, cluster.ranks_per_node
    if n == 1:
        return 0.0
    passing = int(size * (n - 1) / n)
    sends = [Send(rank, rank - rank % each + (rank + 1) % each, passing) for rank in range(n)]
    if cluster.nodes > 1:
        sends += [Send(rank, (rank + each) % n, passing // each) for rank in range(n)]
    return cluster.transit(sends)
