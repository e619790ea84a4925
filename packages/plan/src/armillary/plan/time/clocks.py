"""The time of a `CommPlan` on a cluster: `plan_seconds` advances two clocks of every rank, step by step.

All steps are timed at once first (`timed_exchanges`), because the network's time of a step does not depend on when it
starts. `all_gather_seconds` is the time of NCCL's all-gathers of parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import NamedTuple

import numpy as np

from armillary.attention.plans import Move, Send, Step
from armillary.plan.cluster import Cluster
from armillary.plan.cluster.network import Floats, Integers, concurrent_seconds, deliveries

# Ranks at the ends of a send: (source, target).
Ends = tuple[int, int]


@dataclass(frozen=True)
class PassTime:
    """Seconds of one or more passes (forward or backward) of attention, by cause.

    Args:
        compute: kernels, and expansion of latents, as if nothing were sent.
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

    ready: Floats
    transfers_done: Floats

    def after(self, compute: Floats, moves: TimedSends, results: TimedSends, overlap: bool = True) -> Clocks:
        """Returns the clocks after one more step. `compute` is empty if the step only communicates."""
        # A rank starts its next step once it has computed this one, has received the tensors that the step moves to it,
        # and has handed those that it sends to the network (`Link.buffer`). Results must arrive by the end of the next
        # step's computation.
        # 1. Computation. A step that only communicates has no kernels to run beside the previous step's result
        # transfers, so it starts after them.
        start = self.ready if len(compute) else np.maximum(self.ready, self.transfers_done)
        compute = compute if len(compute) else np.zeros(len(start))
        # A step ends no earlier than the result transfers of the step before.
        computed = np.maximum(start + compute, self.transfers_done)
        ready, transfers_done = computed.copy(), computed.copy()
        # 2. A move starts once both of its ends have reached the step; without overlap, once both have computed it.
        if not overlap:
            start, compute = computed, np.zeros(len(start))
        if len(moves.source):
            begin = np.maximum(start[moves.source], start[moves.target])
            received = concurrent_seconds(moves.seconds, compute[moves.target], moves.disturbs)
            sent = concurrent_seconds(moves.sending, compute[moves.source], moves.disturbs)
            np.maximum.at(ready, moves.target, begin + received)
            np.maximum.at(ready, moves.source, begin + sent)
        # 3. The transfer of a result starts once both of its ends have computed the step.
        if len(results.source):
            begin = np.maximum(computed[results.source], computed[results.target])
            np.maximum.at(transfers_done, results.target, begin + results.seconds)
            np.maximum.at(transfers_done, results.source, begin + results.sending)
        return Clocks(ready, transfers_done)


def plan_seconds(
    steps: Sequence[Step],
    cluster: Cluster,
    seconds_per_pair: float,
    copies: int = 1,
    overlap: bool = True,
    stride: int = 1,
    seconds_per_key: float = 0.0,
) -> PassTime:
    """Time of one pass of attention, until the last rank is done.

    Args:
        steps: steps of the forward or of the backward of a plan over P ranks.
        seconds_per_pair: kernel seconds per visible (query, key) pair of a head.
        copies: number of groups of P ranks that run the plan at the same time and share links.
        overlap: False for a kernel that leaves no multiprocessor to NCCL: a step's moves then start after the kernel.
        stride: distance between successive ranks of a group, which is the number of groups that interleave. Tensor
            parallelism over tp ranks has stride tp. `copies` counts all groups, interleaved ones too.
        seconds_per_key: seconds to expand the key and value of a head from a latent; in backward also their gradients.
    """
    ranks, overhead = cluster.ranks // copies, cluster.accelerator.step  # seconds of overhead in each step
    clocks, kernel_seconds, exchange = Clocks(np.zeros(ranks), np.zeros(ranks)), np.zeros(ranks), 0.0
    timed = timed_exchanges(dict.fromkeys((step.moves, step.later_moves) for step in steps), cluster, copies, stride)
    for step in steps:
        compute = np.array(step.pairs, np.float64) * seconds_per_pair + overhead
        if any(step.expanded):
            compute += np.array(step.expanded) * seconds_per_key
        moves, results = timed[step.moves, step.later_moves]
        clocks = clocks.after(compute, moves, results, overlap)
        if step.pairs:
            kernel_seconds += compute
        exchange += max(moves.longest, results.longest)
    overheads = overhead * sum(bool(step.pairs) for step in steps)  # included in every rank's `compute` above
    # Time beyond the busiest rank's computation is exposed communication, or waiting for slower ranks.
    busiest, end = float(kernel_seconds.max(initial=0.0)), max(float(clock.max(initial=0.0)) for clock in clocks)
    return PassTime(compute=busiest - overheads, exposed=end - busiest, overhead=overheads, exchange=exchange)


Moves = tuple[Move, ...]


class TimedSends(NamedTuple):
    """Timing of a step's sends: fields of `Delivery` and `Link.disturbs` as arrays, and the `longest` in seconds."""

    source: Integers
    target: Integers
    seconds: Floats
    sending: Floats
    disturbs: Floats
    longest: float


def timed_exchanges(
    exchanges: Iterable[tuple[Moves, Moves]], cluster: Cluster, copies: int, stride: int = 1
) -> dict[tuple[Moves, Moves], tuple[TimedSends, TimedSends]]:
    """Timing of the (moves, later moves) of different steps in a group, while all `copies` groups send the same."""
    exchanges, ranks = list(exchanges), cluster.ranks // copies
    # 1. The sends of all steps in one array, with ranks of the group. `exchange` is 2 i for the moves of step i, and
    # 2 i + 1 for its later moves.
    sends_of = [
        (2 * i + is_later, sends_by_round(move))
        for i, step_moves in enumerate(exchanges)
        for is_later, moves in enumerate(step_moves)
        for move in moves
    ]
    numbers = chain.from_iterable(chain.from_iterable(sends for _, sends in sends_of))
    source, target, size = np.fromiter(numbers, np.int64).reshape(-1, 3).T
    exchange = np.repeat(np.array([i for i, _ in sends_of], np.int64), [len(sends) for _, sends in sends_of])
    is_message = (source != target) & (size > 0)
    exchange, source, target, size = (x[is_message] for x in (exchange, source, target, size))
    # 2. Consecutive ranges of stride * ranks ranks hold `stride` interleaved groups each. A group has every `stride`-th
    # rank from its first one on. Ranges that fill whole nodes send nothing to other ranges, and all look the same from
    # the network, so only the first of these are timed.
    width = stride * ranks
    end = min(copies * ranks, lcm(width, cluster.ranks_per_node))
    firsts = np.array([first for start in range(0, end, width) for first in range(start, start + stride)])
    sends = np.stack(np.broadcast_arrays(*(firsts[:, None] + stride * x for x in (source, target)), size), axis=-1)
    # Moves and later moves share the links: in the steady state of a plan, the results of the previous step are in
    # flight during the moves of a step.
    timed = deliveries(cluster.levels, sends.reshape(-1, 3), np.tile(exchange // 2, len(firsts)))
    # 3. A send may cross nodes in one group and not in another, so each send takes as long as in its slowest group.
    slowest = np.argmax(timed.seconds.reshape(len(firsts), -1), axis=0) * len(size) + np.arange(len(size))
    delays = [collective_delays(moves, cluster, stride) for moves, _ in exchanges]
    seconds, sending = timed.seconds[slowest], timed.sending[slowest]
    if any(delays):
        ends = zip((exchange // 2).tolist(), source.tolist(), target.tolist(), strict=True)
        seconds = seconds + [delays[i].get((a, b), 0.0) for i, a, b in ends]
    disturbs = np.array([level.link.disturbs for level in cluster.levels])[timed.level[slowest]]
    bounds = np.searchsorted(exchange, np.arange(2 * len(exchanges) + 1)).tolist()
    parts = [
        TimedSends(source[x], target[x], seconds[x], sending[x], disturbs[x], float(seconds[x].max(initial=0.0)))
        for x in map(slice, bounds, bounds[1:])
    ]
    return dict(zip(exchanges, zip(parts[::2], parts[1::2], strict=True), strict=True))


def sends_by_round(move: Move) -> Sequence[Send]:
    """Returns the sends of a move. A plan has one send for all rounds of an all-gather; here each round has its own."""
    if move.kind != "all_gather":
        return move.sends
    rounds = rounds_of(move)
    return [
        Send(source, target, size // rounds[source])
        for source, target, size in move.sends
        for _ in range(rounds[source])
    ]


def collective_delays(moves: Iterable[Move], cluster: Cluster, stride: int = 1) -> Mapping[Ends, float]:
    """Seconds that collectives take beyond the transfer of their bytes, by (source, target)."""
    delays = defaultdict[Ends, float](float)
    for move in moves:
        # All sends of an all-to-all start together, so it has no delays.
        if move.kind not in ("all_gather", "reduce_scatter"):
            continue
        ends = np.array([(stride * send.source, stride * send.target) for send in move.sends])
        sizes = np.array([send.bytes for send in move.sends])
        # A round passes on the shard of the round before, so each round after the first adds the latency: the time of
        # one byte.
        if move.kind == "all_gather":
            one_byte = np.column_stack((ends, np.ones_like(sizes)))
            latency = float(deliveries(cluster.levels, one_byte, np.arange(len(ends))).seconds.max())
            rounds = rounds_of(move)
            for send in move.sends:
                delays[send.source, send.target] += (rounds[send.source] - 1) * latency
        # Two ranks that send to each other may have to take turns: a request for data queues behind a send.
        # The send in the opposite direction waits for a fraction (`Link.turns`) of this one. A rank's sends share its
        # links with each other alone.
        timed = deliveries(cluster.levels, np.column_stack((ends, sizes)), ends[:, 0])
        waits = np.array([level.link.turns for level in cluster.levels])[timed.level] * timed.seconds
        pairs = {(send.source, send.target) for send in move.sends}
        for send, seconds in zip(move.sends, waits.tolist(), strict=True):
            if (send.target, send.source) in pairs:
                delays[send.target, send.source] += seconds
    return delays


def rounds_of(move: Move) -> dict[int, int]:
    """Rounds of an all-gather by rank: the number of other ranks on its ring, along which the sends lead."""
    successors, rounds = {send.source: send.target for send in move.sends}, dict[int, int]()
    for first in successors:
        if first not in rounds:
            ring = [first]
            while (rank := successors[ring[-1]]) != first:
                ring.append(rank)
            rounds |= dict.fromkeys(ring, len(ring) - 1)
    return rounds


@lru_cache(maxsize=1024)
def all_gather_seconds(cluster: Cluster, size: float, ranks: int | None = None, stride: int = 1) -> float:
    """Seconds to all-gather or reduce-scatter `size` bytes, in all groups of `ranks` ranks at once, like NCCL."""
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
        # NCCL has one ring for each rank that a group has on a node, and each leaves the node at another rank, so that
        # all network cards are used.
        # 2. To the next node. Each rank of a node is the exit of one ring, so it sends a fraction of the bytes.
        if len(on_node) < ranks:
            on_next_node = start + (index + max(per_node, stride)) % width
            sends.append(Send(rank, on_next_node, passed // len(on_node)))
    return cluster.transit(sends)
