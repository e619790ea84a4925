"""Predicts the time of a `CommPlan` on a cluster: advances a clock for every rank, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from armillary.attention.plans import Move, Send, Step
from armillary.plan.cluster.cluster import Cluster
from armillary.plan.cluster.network import Delivery

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
"""FLOPs per visible (query, key) pair, head and element of head dim. A matrix product takes 2: a multiply and an add.

Forward has two products: Q K^T and P V. Backward has five, as FlashAttention-2 (arXiv 2307.08691) counts them: Q K^T
again, dV, dP, dQ and dK.
"""

Ends = tuple[int, int]
"""Ranks at the ends of a send: (source, target)."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one or more passes (forward or backward) of attention, by cause.

    Args:
        compute: kernels, as if nothing were sent.
        exposed: time that communication adds: waiting for transfers or for slower ranks, and the slowdown of kernels
            that run beside transfers.
        overhead: kernel launches and merges of partial results, in each step.
        exchange: all transfers, including those that computation hides. Not a part of `seconds`.
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
    """Two clocks of each rank, in seconds since the pass began.

    Args:
        ready: time at which the rank starts its next step.
        transfers_done: time by which the rank has sent the results of its last step, and received those of other ranks.
    """

    ready: list[float]
    transfers_done: list[float]

    def after(
        self, compute: Sequence[float], moves: Iterable[Delivery], results: Iterable[Delivery], overlap: bool = True
    ) -> Clocks:
        """Returns the clocks after one more step.

        Args:
            compute: seconds of each rank's kernels; empty if the step only communicates.
            moves: transfers that the step waits for.
            results: transfers of the step's results, which overlap with the next step's computation.
            overlap: True if moves run beside the computation, False if after it.
        """
        # 1. Computation. A step that only communicates has no kernels to run beside the previous step's result
        # transfers, so it starts after them.
        start = self.ready if compute else [max(pair) for pair in zip(self.ready, self.transfers_done, strict=True)]
        compute = compute or [0.0] * len(start)
        # A step ends no earlier than the result transfers of the step before.
        computed = [
            max(begin + seconds, transferred)
            for begin, seconds, transferred in zip(start, compute, self.transfers_done, strict=True)
        ]
        ready, transfers_done = list(computed), list(computed)
        # 2. A move starts once both of its ends have reached the step; without overlap, once both have computed it.
        if not overlap:
            start, compute = computed, [0.0] * len(start)
        for send in moves:
            begin = max(start[send.source], start[send.target])
            source, target = send.source, send.target
            ready[target] = max(ready[target], begin + send.receive_and_compute(compute[target]))
            ready[source] = max(ready[source], begin + send.send_and_compute(compute[source]))
        # 3. The transfer of a result starts once both of its ends have computed the step.
        for send in results:
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

    A transfer starts when both of its ends have reached the step. A rank starts its next step once it has computed the
    step, has received the tensors that the step moves to it, and has handed the tensors that it sends to the network
    (see `Link.buffer`). The results that a step sends must arrive by the end of the next step's computation.

    Args:
        steps: steps of the forward or of the backward of a plan over P ranks.
        seconds_per_pair: kernel seconds per visible (query, key) pair of a head.
        copies: number of groups of P ranks that run the plan at the same time and share links. With stride 1 they are
            the ranks 0..P-1, P..2P-1, ...
        overlap: False for a kernel that leaves no multiprocessor to NCCL: a step's moves then start after the kernel.
        stride: distance between successive ranks of a group, which is the number of groups that interleave. Tensor
            parallelism over tp ranks has stride tp. `copies` counts all groups, interleaved ones too.
    """
    ranks, overhead = cluster.ranks // copies, cluster.accelerator.step  # seconds of overhead in each step
    clocks, kernel_seconds, exchange = Clocks([0.0] * ranks, [0.0] * ranks), [0.0] * ranks, 0.0
    for step in steps:
        compute = [pairs * seconds_per_pair + overhead for pairs in step.pairs]
        moves, results = step_deliveries(step.moves, step.later_moves, cluster, copies, stride)
        clocks = clocks.after(compute, moves, results, overlap)
        if compute:
            kernel_seconds = [a + b for a, b in zip(kernel_seconds, compute, strict=True)]
        exchange += max((delivery.seconds for delivery in (*moves, *results)), default=0.0)
    overheads = overhead * sum(bool(step.pairs) for step in steps)  # included in every rank's `compute` above
    # Time beyond the busiest rank's computation is exposed communication, or waiting for slower ranks.
    busiest = max(kernel_seconds, default=0.0)
    end = max((*clocks.ready, *clocks.transfers_done), default=0.0)
    return PassTime(compute=busiest - overheads, exposed=end - busiest, overhead=overheads, exchange=exchange)


@lru_cache(maxsize=4096)  # steps of a ring, and stages of heads, are mostly equal
def step_deliveries(
    moves: tuple[Move, ...], later_moves: tuple[Move, ...], cluster: Cluster, copies: int, stride: int = 1
) -> tuple[list[Delivery], list[Delivery]]:
    """Timing of a step's (moves, later moves) in a group, while all `copies` groups send the same.

    Moves and later moves share the links: in the steady state of a plan, the results of the previous step are in flight
    during the moves of a step.
    """
    ranks = cluster.ranks // copies
    sends = [send for move in moves for send in sends_by_round(move)]
    later_sends = [send for move in later_moves for send in sends_by_round(move)]
    # Consecutive ranges of stride * ranks ranks hold `stride` interleaved groups each. A group has every `stride`-th
    # rank from its first one on.
    all_sends = [
        Send(first + stride * source, first + stride * target, size)
        for start in range(0, copies * ranks, stride * ranks)
        for first in range(start, start + stride)
        for source, target, size in (*sends, *later_sends)
    ]
    timed = cluster.deliveries(all_sends)
    # A send may cross nodes in one group and not in another, so each send takes as long as in its slowest group.
    per_group = len(timed) // copies
    slowest = (max(timed[i::per_group], key=lambda delivery: delivery.seconds) for i in range(per_group))
    delays = collective_delays(moves, cluster, stride)
    # Convert ranks of the cluster back to ranks of the group.
    result = list[Delivery]()
    for delivery in slowest:
        source, target = (rank // stride % ranks for rank in (delivery.source, delivery.target))
        seconds = delivery.seconds + delays[source, target]
        result.append(delivery._replace(source=source, target=target, seconds=seconds))
    return result[: len(sends)], result[len(sends) :]


def sends_by_round(move: Move) -> Iterator[Send]:
    """Yields the sends of a move. A plan has one send for all rounds of an all-gather; this yields one per round."""
    for send in move.sends:
        rounds = ring_peers(move, send.source) if move.kind == "all_gather" else 1
        yield from [send._replace(bytes=send.bytes // rounds)] * rounds


def collective_delays(moves: Iterable[Move], cluster: Cluster, stride: int = 1) -> Mapping[Ends, float]:
    """Seconds that collectives take beyond the transfer of their bytes, by (source, target).

    Each round of an all-gather waits for the round before. In all-gathers and reduce-scatters, two ranks that send to
    each other may have to take turns (`Link.turns`): a rank's request for data queues behind the data that it sends.
    An all-to-all has neither of these delays, because all of its sends start together.
    """
    delays = defaultdict[Ends, float](float)
    for move in moves:
        # A round passes on the shard of the round before, so each round after the first adds the latency: the time of
        # one byte.
        if move.kind == "all_gather":
            latency = max(cluster.transit([Send(stride * a, stride * b, 1)]) for a, b, _ in move.sends)
            for send in move.sends:
                delays[send.source, send.target] += (ring_peers(move, send.source) - 1) * latency
        # The send in the opposite direction waits for a fraction (`Link.turns`) of this one.
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
    """Number of other ranks on the ring of an all-gather. Follows its sends until they return to `rank`."""
    successors = {send.source: send.target for send in move.sends}
    count, current = 0, successors[rank]
    while current != rank:
        count, current = count + 1, successors[current]
    return count


@lru_cache(maxsize=1024)
def all_gather_seconds(cluster: Cluster, size: float, ranks: int | None = None, stride: int = 1) -> float:
    """Seconds to all-gather a tensor of `size` bytes, or to reduce-scatter it, in all groups of ranks at once.

    Like NCCL, uses one ring for each rank that a group has on a node. Each ring passes through all of these ranks and
    leaves the node at another one, so that all network cards are used.

    Args:
        ranks: number of ranks of a group; by default all.
        stride: distance between successive ranks of a group, as in `plan_seconds`.
    """
    ranks, per_node = ranks or cluster.ranks, cluster.ranks_per_node
    if ranks == 1:
        return 0.0
    # In a ring all-gather, all shards except the receiver's pass each link of the ring.
    passed = int(size * (ranks - 1) / ranks)
    # `stride` interleaved groups fill `width` consecutive ranks, from `start` on.
    width, sends = ranks * stride, list[Send]()
    for rank in range(cluster.ranks):
        start, index = rank - rank % width, rank % width
        # 1. To the next rank of the group on the same node: all rings together pass all of the bytes.
        on_node = [i for i in range(index % stride, width, stride) if (start + i) // per_node == rank // per_node]
        next_on_node = on_node[(on_node.index(index) + 1) % len(on_node)]
        sends.append(Send(rank, start + next_on_node, passed))
        # 2. To the next node. Each rank of a node is the exit of one ring, so it sends a fraction of the bytes.
        if len(on_node) < ranks:
            on_next_node = start + (index + max(per_node, stride)) % width
            sends.append(Send(rank, on_next_node, passed // len(on_node)))
    return cluster.transit(sends)
