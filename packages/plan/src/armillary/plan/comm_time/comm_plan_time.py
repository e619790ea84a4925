"""How long a `CommPlan` takes on a cluster: each rank waits for what it computes, sends and receives, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from armillary.attention.planning.comm_plan import Move, Step
from armillary.core.network import Send
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.cluster.network import Delivery

FORWARD, BACKWARD = 4, 10
"""Floating-point operations for each visible (query, key) pair of a head, by head dim: two products, and five."""

Ends = tuple[int, int]
"""Source and target of a send."""


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

    def times(self, n: float) -> Span:
        """n of these."""
        return Span(n * self.compute, n * self.exposed, n * self.overhead, n * self.exchange)

    def __add__(self, other: Span) -> Span:
        return Span(
            self.compute + other.compute,
            self.exposed + other.exposed,
            self.overhead + other.overhead,
            self.exchange + other.exchange,
        )


def spent(
    steps: Sequence[Step], cluster: Cluster, seconds_per_pair: float, copies: int = 1, overlap: bool = True
) -> Span:
    """One pass of attention, by all ranks together, until the last is through.

    A rank goes on to its next step when it has computed, has received that step's moves, and is done with sending them
    (see `Link.buffer`); what is leaving has until the next step is computed. Sends begin when both ends are there.

    Args:
        steps: of the forward or of the backward of a plan over P ranks.
        seconds_per_pair: that a rank takes for each visible (query, key) pair of a head.
        copies: of the plan that run side by side, on ranks 0..P-1, P..2P-1 and so on, and share wires.
        overlap: whether a step's moves are under way while it computes; else they begin after that, because its kernel
            leaves no multiprocessor to NCCL.
    """
    ranks, overhead = cluster.ranks // copies, cluster.accelerator.step
    clocks, computing, exchange = Clocks([0.0] * ranks, [0.0] * ranks), [0.0] * ranks, 0.0
    for step in steps:
        compute = [pairs * seconds_per_pair + overhead for pairs in step.pairs]
        under_way = sent(step.moves, step.later_moves, cluster, copies)
        clocks = clocks.after(compute, *under_way, overlap=overlap)
        computing = [a + b for a, b in zip(computing, compute, strict=True)] if compute else computing
        exchange += max((delivery.seconds for deliveries in under_way for delivery in deliveries), default=0.0)
    overheads = overhead * sum(bool(step.pairs) for step in steps)
    busiest = max(computing, default=0.0)
    return Span(busiest - overheads, max((*clocks.free, *clocks.owed), default=0.0) - busiest, overheads, exchange)


class Clocks(NamedTuple):
    """How far all ranks are.

    Args:
        free: when each begins its next step.
        owed: when it will be done with what it sends and receives of the last step.
    """

    free: list[float]
    owed: list[float]

    def after(
        self, compute: Sequence[float], moves: Iterable[Delivery], leaving: Iterable[Delivery], overlap: bool = True
    ) -> Clocks:
        """Clocks after one more step; `compute` is empty where nothing is computed."""
        begin = self.free if compute else [max(pair) for pair in zip(self.free, self.owed, strict=True)]
        compute = compute or [0.0] * len(begin)
        done = [max(a + b, late) for a, b, late in zip(begin, compute, self.owed, strict=True)]
        ends, owed = list(done), list(done)
        if not overlap:
            begin, compute = done, [0.0] * len(begin)
        for send in moves:
            start = max(begin[send.source], begin[send.target])
            ends[send.target] = max(ends[send.target], start + send.beside(compute[send.target]))
            ends[send.source] = max(ends[send.source], start + send.sending_beside(compute[send.source]))
        for send in leaving:
            start = max(done[send.source], done[send.target])
            owed[send.target] = max(owed[send.target], start + send.seconds)
            owed[send.source] = max(owed[send.source], start + send.sending)
        return Clocks(ends, owed)


@lru_cache(maxsize=4096)  # steps of a ring, and stages of heads, are much alike
def sent(
    moves: tuple[Move, ...], leaving: tuple[Move, ...], cluster: Cluster, copies: int
) -> tuple[list[Delivery], list[Delivery]]:
    """How long what the first of several groups of ranks sends takes, while the others send the same.

    Moves and what is leaving share wires: in the steady state there is always some of both.
    """
    ranks = cluster.ranks // copies
    sends, more = ([send for move in some for send in in_rounds(move)] for some in (moves, leaving))
    firsts = range(0, copies * ranks, ranks)
    every = cluster.deliveries(Send(a + first, b + first, size) for first in firsts for a, b, size in (*sends, *more))
    each = len(every) // copies
    found = [_slowest(every, range(part, len(every), each), ranks) for part in range(each)]
    late = lateness(moves, cluster)
    found = [one._replace(seconds=one.seconds + late[one.source, one.target]) for one in found]
    return found[: len(sends)], found[len(sends) :]


def _slowest(every: Sequence[Delivery], copies: Iterable[int], ranks: int) -> Delivery:
    """Of the same send of several groups, as that of the first."""
    slowest = max((every[i] for i in copies), key=lambda one: one.seconds)
    return slowest._replace(source=slowest.source % ranks, target=slowest.target % ranks)


def in_rounds(move: Move) -> Iterator[Send]:
    """A move's sends; of an all-gather, which its plan gives as the sum of them, each round's."""
    for send in move.sends:
        rounds = others(move, send.source) if move.kind == "all_gather" else 1
        yield from [send._replace(bytes=send.bytes // rounds)] * rounds


def lateness(moves: Iterable[Move], cluster: Cluster) -> Mapping[Ends, float]:
    """Seconds that collectives take longer than their bytes do, by source and target.

    Each round of an all-gather waits for the one before. Ranks that send each other tokens, or sums of them, may have
    to take turns (see `Link.turns`); when they redistribute heads they are still in step.
    """
    late = defaultdict[Ends, float](float)
    for move in moves:
        rounds = _rounds(move, cluster) if move.kind == "all_gather" else ()
        turns = _turns(move, cluster) if move.kind in ("all_gather", "reduce_scatter") else ()
        for ends, seconds in (*rounds, *turns):
            late[ends] += seconds
    return late


def _rounds(move: Move, cluster: Cluster) -> Iterator[tuple[Ends, float]]:
    slowest = max(cluster.transit([send._replace(bytes=1)]) for send in move.sends)
    return (((send.source, send.target), (others(move, send.source) - 1) * slowest) for send in move.sends)


def _turns(move: Move, cluster: Cluster) -> Iterator[tuple[Ends, float]]:
    """What a rank asks for goes behind all that it sends."""
    by_source = defaultdict[int, list[Send]](list)
    for send in move.sends:
        by_source[send.source].append(send)
    for sends in by_source.values():
        for found in cluster.deliveries(sends):
            if any(back.target == found.source for back in by_source[found.target]):
                yield (found.target, found.source), found.link.turns * found.seconds


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
