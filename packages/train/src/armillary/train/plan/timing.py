"""How long a schedule takes on a cluster: each step as long as the slower of computing and sending."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from armillary.attention.schedule import Move, Step
from armillary.core import Cluster, Send, Transit

FORWARD, BACKWARD = 4, 10
"""Floating-point operations for each visible (query, key) pair of a head, by head dim: two products, and five."""


@dataclass(frozen=True)
class Span:
    """Seconds, and what they are spent on.

    Args:
        compute: kernels, as if nothing were sent.
        exposed: waiting for exchanges, and computing more slowly beside them.
        overhead: what steps cost beside both.
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


def spent(steps: Iterable[Step], cluster: Cluster, seconds_per_pair: float, copies: int = 1) -> Span:
    """One pass of attention, by all ranks together.

    Ranks go from step to step together: what one has more to do than others, all wait for.

    Args:
        steps: of the forward or of the backward of a schedule over P ranks.
        seconds_per_pair: that a rank takes for each visible (query, key) pair of a head.
        copies: of the schedule that run side by side, on ranks 0..P-1, P..2P-1 and so on, and share wires.
    """
    total = Span()
    for step in steps:
        compute = max(step.pairs, default=0) * seconds_per_pair
        transit = under_way(step.moves, cluster, copies)
        overhead = cluster.accelerator.step if compute else 0.0
        total += Span(compute, transit.beside(compute) - compute, overhead, transit.seconds)
    return total


@lru_cache(maxsize=4096)  # steps of a ring, and stages of heads, are much alike
def under_way(moves: tuple[Move, ...], cluster: Cluster, copies: int) -> Transit:
    """What moves take together, made by each of several groups of ranks."""
    ranks, sends = cluster.ranks // copies, [send for move in moves for send in move.sends]
    firsts = range(0, copies * ranks, ranks)
    return cluster.transit(Send(a + first, b + first, size) for first in firsts for a, b, size in sends)


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
    return cluster.transit(sends).seconds
