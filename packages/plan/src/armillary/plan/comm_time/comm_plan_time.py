"""Predicts the time of a `CommPlan` on a cluster, by a simulation of every rank's clock, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from armillary.attention.planning.comm_plan import Move, Step
from armillary.attention.planning.send import Send
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.cluster.network import Delivery

FORWARD, BACKWARD = 4, 10
"""FLOPs per visible (query, key) pair, head and unit of head dim, 2 for each matrix product.

Forward: Q K^T and P V. Backward, as FlashAttention-2 (arXiv 2307.08691) counts it: Q K^T again, dV, dP, dQ and dK.
"""

Ends = tuple[int, int]
"""(source, target) of a send."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one or more passes (forward or backward) of attention, by cause.

    Args:
        compute: kernels, as if nothing were sent.
        exposed: waiting for exchanges, and the slowdown of kernels beside them.
        overhead: launches and merges of each step.
        exchange: all exchanges, hidden ones included; no part of `seconds`.
    """

    compute: float = 0.0
    exposed: float = 0.0
    overhead: float = 0.0
    exchange: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.overhead

    def times(self, n: float) -> PassTime:
        """`n` such passes, one after another."""
        return PassTime(n * self.compute, n * self.exposed, n * self.overhead, n * self.exchange)

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(
            self.compute + other.compute,
            self.exposed + other.exposed,
            self.overhead + other.overhead,
            self.exchange + other.exchange,
        )


class Clocks(NamedTuple):
    """Clock of each rank, in seconds since the pass began.

    Args:
        ready: time at which the rank starts its next step.
        transfers_done: time at which the transfers of its last step's results are done, outgoing and incoming.
    """

    ready: list[float]
    transfers_done: list[float]

    def after(
        self, compute: Sequence[float], moves: Iterable[Delivery], leaving: Iterable[Delivery], overlap: bool = True
    ) -> Clocks:
        """Returns the clocks after one more step.

        Args:
            compute: seconds of each rank's kernels; empty if the step only communicates.
            moves: transfers that the step waits for.
            leaving: transfers of the step's results, which overlap with the next step's computation.
            overlap: True if moves run beside the computation, False if after it.
        """
        # 1. Computation. A step without any has nothing to hide earlier transfers behind, so it waits for them.
        start = self.ready if compute else [max(pair) for pair in zip(self.ready, self.transfers_done, strict=True)]
        compute = compute or [0.0] * len(start)
        # A step ends no earlier than the result transfers of the step before.
        computed = [max(a + b, t) for a, b, t in zip(start, compute, self.transfers_done, strict=True)]
        ready, transfers_done = list(computed), list(computed)
        # 2. Moves run beside the computation, once both ends have reached the step; without overlap, once both have
        # computed it.
        if not overlap:
            start, compute = computed, [0.0] * len(start)
        for send in moves:
            begin = max(start[send.source], start[send.target])
            source, target = send.source, send.target
            ready[target] = max(ready[target], begin + send.receive_and_compute(compute[target]))
            ready[source] = max(ready[source], begin + send.send_and_compute(compute[source]))
        # 3. Results leave once both ends have computed them.
        for send in leaving:
            begin = max(computed[send.source], computed[send.target])
            transfers_done[send.target] = max(transfers_done[send.target], begin + send.seconds)
            transfers_done[send.source] = max(transfers_done[send.source], begin + send.sending)
        return Clocks(ready, transfers_done)


def plan_seconds(
    steps: Sequence[Step],
    cluster: Cluster,
    seconds_per_pair: float,
    copies: int = 1,
    overlap: bool = True,
    stride: int = 1,
) -> PassTime:
    """Time of one pass of attention, until the last rank is done.

    A transfer starts when both of its ends have reached the step. A rank starts its next step once it has computed,
    received the step's moves and handed over its own (see `Link.buffer`). Results have until the end of the next step's
    computation to arrive.

    Args:
        steps: forward or backward of a plan over P ranks.
        seconds_per_pair: kernel seconds per visible (query, key) pair of a head.
        copies: number of groups that run the plan side by side, on ranks 0..P-1, P..2P-1, ..., and share links.
        overlap: False for a kernel that leaves no multiprocessor to NCCL: a step's moves then start after it.
        stride: distance of a group's ranks; as many groups interleave (tensor parallelism), which `copies` contains.
    """
    ranks, overhead = cluster.ranks // copies, cluster.accelerator.step
    clocks, kernel_seconds, exchange = Clocks([0.0] * ranks, [0.0] * ranks), [0.0] * ranks, 0.0
    for step in steps:
        compute = [pairs * seconds_per_pair + overhead for pairs in step.pairs]
        moves, leaving = step_deliveries(step.moves, step.later_moves, cluster, copies, stride)
        clocks = clocks.after(compute, moves, leaving, overlap)
        if compute:
            kernel_seconds = [a + b for a, b in zip(kernel_seconds, compute, strict=True)]
        exchange += max((delivery.seconds for delivery in (*moves, *leaving)), default=0.0)
    overheads = overhead * sum(bool(step.pairs) for step in steps)  # part of every rank's `compute` above
    # Time beyond the busiest rank's computation is exposed communication, or waiting for slower ranks.
    busiest = max(kernel_seconds, default=0.0)
    end = max((*clocks.ready, *clocks.transfers_done), default=0.0)
    return PassTime(busiest - overheads, end - busiest, overheads, exchange)


@lru_cache(maxsize=4096)  # steps of a ring, and stages of heads, are mostly equal
def step_deliveries(
    moves: tuple[Move, ...], leaving: tuple[Move, ...], cluster: Cluster, copies: int, stride: int = 1
) -> tuple[list[Delivery], list[Delivery]]:
    """Timing of a step's (moves, leaving) in the first of `copies` groups, while the others send the same.

    Both share the links: in the steady state of a plan, transfers of either kind are always in flight.
    """
    ranks = cluster.ranks // copies
    sends = [send for move in moves for send in rounds_of(move)]
    leaving_sends = [send for move in leaving for send in rounds_of(move)]
    all_sends = [
        Send(first + stride * source, first + stride * target, size)
        for block in range(0, copies * ranks, stride * ranks)
        for first in range(block, block + stride)
        for source, target, size in (*sends, *leaving_sends)
    ]
    timed = cluster.deliveries(all_sends)
    # Groups lie on nodes differently, so the same send may be slower in one of them: the slowest counts.
    per_group = len(timed) // copies
    slowest = (max(timed[i::per_group], key=lambda one: one.seconds) for i in range(per_group))
    delays = collective_delays(moves, cluster, stride)
    # Ranks of the cluster become ranks of the group again.
    result = list[Delivery]()
    for delivery in slowest:
        source, target = (rank // stride % ranks for rank in (delivery.source, delivery.target))
        seconds = delivery.seconds + delays[source, target]
        result.append(delivery._replace(source=source, target=target, seconds=seconds))
    return result[: len(sends)], result[len(sends) :]


def rounds_of(move: Move) -> Iterator[Send]:
    """Yields the sends of a move. The plan has the sum of an all-gather's rounds, which are yielded one by one."""
    for send in move.sends:
        rounds = ring_peers(move, send.source) if move.kind == "all_gather" else 1
        yield from [send._replace(bytes=send.bytes // rounds)] * rounds


def collective_delays(moves: Iterable[Move], cluster: Cluster, stride: int = 1) -> Mapping[Ends, float]:
    """Seconds that collectives take beyond the transfer of their bytes, by (source, target).

    Each round of an all-gather waits for the round before. In all-gathers and reduce-scatters, ranks that send to each
    other may have to take turns (`Link.turns`): a request for data queues behind the data that the rank sends itself.
    An all-to-all has neither delay, because all of its ranks start together.
    """
    delays = defaultdict[Ends, float](float)
    for move in moves:
        # A round passes on the shard of the round before, so each round pays the latency.
        if move.kind == "all_gather":
            slowest = max(cluster.transit([Send(stride * a, stride * b, 1)]) for a, b, _ in move.sends)
            for send in move.sends:
                delays[send.source, send.target] += (ring_peers(move, send.source) - 1) * slowest
        # The opposite direction waits for a share (`turns`) of this one.
        if move.kind in ("all_gather", "reduce_scatter"):
            by_source = defaultdict[int, list[Send]](list)
            for send in move.sends:
                by_source[send.source].append(send)
            for source, sends in by_source.items():
                placed = (Send(stride * source, stride * send.target, send.bytes) for send in sends)
                for delivery in cluster.deliveries(placed):
                    target = delivery.target // stride
                    if any(back.target == source for back in by_source[target]):
                        delays[target, source] += delivery.link.turns * delivery.seconds
    return delays


def ring_peers(move: Move, rank: int) -> int:
    """Number of other ranks on the ring of an all-gather."""
    successors = {send.source: send.target for send in move.sends}
    count, current = 0, successors[rank]
    while current != rank:
        count, current = count + 1, successors[current]
    return count


@lru_cache(maxsize=1024)
def all_gather_seconds(cluster: Cluster, size: float, ranks: int | None = None, stride: int = 1) -> float:
    """Seconds to all-gather a tensor of `size` bytes, or to reduce-scatter it, in all groups of ranks at once.

    Like NCCL: one ring per network card. A ring passes through the ranks of a group on each node and leaves the node at
    a different one, so all cards are used.

    Args:
        ranks: number of a group's ranks; by default all.
        stride: distance of a group's ranks. As many groups interleave in a block of ranks, and blocks fill the cluster.
    """
    ranks, per_node = ranks or cluster.ranks, cluster.ranks_per_node
    if ranks == 1:
        return 0.0
    # A ring all-gather: (ranks - 1) / ranks of the bytes pass through every link of the ring.
    passed = int(size * (ranks - 1) / ranks)
    block, sends = ranks * stride, list[Send]()
    for rank in range(cluster.ranks):
        start, index = rank - rank % block, rank % block
        # 1. To the next rank of the group on the same node: all rings together pass all of the bytes.
        on_node = [i for i in range(index % stride, block, stride) if (start + i) // per_node == rank // per_node]
        following = on_node[(on_node.index(index) + 1) % len(on_node)]
        sends.append(Send(rank, start + following, passed))
        # 2. To the next node: each rank is the exit of one ring, which has its share of the bytes.
        if len(on_node) < ranks:
            across = start + (index + max(per_node, stride)) % block
            sends.append(Send(rank, across, passed // len(on_node)))
    return cluster.transit(sends)
