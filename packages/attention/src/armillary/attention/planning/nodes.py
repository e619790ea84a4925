"""Communication and memory of `Ring(nodes, inner=method)`: a ring between nodes, another method within each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from armillary.attention.methods.ring import Backward, check_backward
from armillary.attention.planning.base import SequencePlan
from armillary.attention.planning.comm_plan import (
    AttentionShape,
    Block,
    CommPlan,
    Move,
    Payload,
    Step,
    Steps,
    move,
    renumber,
    side_by_side,
    steps,
)
from armillary.attention.planning.memory import Sizes, kernel_forward, rotate_keys_forward
from armillary.attention.planning.ring import RingPlan, backward_side, ring_backward_memory, rotates_queries
from armillary.attention.planning.rotation import TokenSends, ring_reduce_sends, rotation_sends
from armillary.attention.planning.send import Send
from armillary.attention.planning.token_ring import TokenRingPlan
from armillary.attention.rotation.nodes import NodeRings, NodeStep


@dataclass(frozen=True)
class NodeRingPlan(SequencePlan):
    """Plan of a `Ring` on axis "nodes" around an inner method on axis "devices".

    Args:
        nodes: M; P ranks are M nodes of P / M devices.
        backward: the side that rotates in backward, between nodes and in an inner ring.

    Raises:
        ValueError: an unknown `backward`.
    """

    nodes: int
    backward: Backward = "auto"

    def __post_init__(self) -> None:
        check_backward(self.backward)

    @property
    def inner(self) -> SequencePlan:
        """The plan of the method within a node."""
        raise self.missing("inner")

    def devices(self, ranks: int) -> int:
        """Returns the number of devices of a node.

        Raises:
            ValueError: the nodes do not divide the ranks.
        """
        if self.nodes < 1 or ranks % self.nodes:
            raise ValueError(f"nodes={self.nodes} must divide the {ranks} ranks of the sequence axis")
        return ranks // self.nodes

    @property
    def balanced_by(self) -> None:
        """None: no balanced layout is made for two levels of axes."""
        return None

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        devices = self.devices(work.layout.shards)
        forward = NodeSteps(work, NodeRings.of(devices, "keys", work.grid), self.inner.comm_plan)
        side = backward_side(work, self.backward)
        backward = NodeSteps(work, NodeRings.of(devices, side, work.grid), self.inner.comm_plan)
        if side == "keys":
            rotating_payload, sums = work.payload("k", "v"), work.payload("dk", "dv")
        else:
            rotating_payload, sums = work.payload("q", "out", "dout", "lse"), work.payload("dq")
        return CommPlan(
            forward.steps(work.payload("k", "v"), None, lambda plan: plan.forward),
            backward.steps(rotating_payload, sums, lambda plan: plan.backward),
        )

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of the first step, or of a later one: keys between nodes, merged results, and the inner method."""
        devices, inner = self.devices(ranks), self.inner
        if self.nodes == 1 or devices == 1:
            return inner.forward_memory(x, devices) if self.nodes == 1 else rotate_keys_forward(x, ranks)
        # k and v of the visiting shard, of the one that arrives, and half of the one that was just sent: 2.5 pairs.
        # With two nodes nothing arrives at the second and last step, and out of the first step is still in its own
        # dtype.
        buffers = 2 * x.k * (1 if self.nodes == 2 else 2.5)
        merge_bytes = (1 if self.nodes == 2 else x.w) * x.q + x.lse
        first_step = 3 * x.k + inner.forward_memory(x, devices)
        return max(first_step, buffers + merge_bytes + self.other_node_forward(x, devices))

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of a later step than the first: shards in flight between nodes, sums of gradients, the inner method."""
        devices, inner = self.devices(ranks), self.inner
        if self.nodes == 1 or devices == 1:
            return (
                inner.backward_memory(x, devices) if self.nodes == 1 else ring_backward_memory(x, ranks, self.backward)
            )
        # With more than two nodes, three shards and three sums of gradients exist at the same time: one that arrives,
        # one in use and one that is sent. Of the shard that is sent, half is free again on average.
        shard_copies, sum_copies = (2.5, 3) if self.nodes > 2 else (1, 1)
        if rotates_queries(x, self.backward):
            outer = x.rotating * shard_copies + x.w * x.q * sum_copies + 2 * x.w * x.k
        else:
            outer = 2 * x.k * shard_copies + x.w * x.q + 2 * x.w * x.k * sum_copies
        return outer + self.other_node_backward(x, devices)

    def other_node_forward(self, x: Sizes, devices: int) -> float:
        """Returns the peak of the inner method's forward with keys of another node: none of its blocks is causal."""
        return self.inner.forward_memory(x, devices) + self.wide_query_sums(x, devices)

    def other_node_backward(self, x: Sizes, devices: int) -> float:
        """Returns the peak of the inner method's backward with another node's keys or queries."""
        return self.inner.backward_memory(x, devices)

    def wide_query_sums(self, x: Sizes, devices: int) -> float:
        """Returns the extra bytes of out or dq in the accumulation dtype; 0 if they are not in memory at the peak.

        With keys of another node, no first block covers all queries, so no kernel result can serve as the first sum.
        """
        return (x.w - 1) * x.q if devices == 2 else 0


@dataclass(frozen=True)
class NodeSteps:
    """Steps of a ring between nodes, on all ranks. During each of them every node runs all steps of the inner method.

    Args:
        inner_plan: plan of the inner method for the queries and keys that meet in a node.
    """

    work: AttentionShape
    rings: NodeRings
    inner_plan: Callable[[AttentionShape], CommPlan]

    def steps(self, rotating: Payload, sums: Payload | None, inner_steps: Callable[[CommPlan], Steps]) -> Steps:
        """Returns the steps of forward or backward.

        Args:
            rotating: tensors that travel between nodes.
            sums: gradient sums, which are sent one step after their tokens; None in forward.
            inner_steps: takes forward or backward of the inner plan.
        """
        result, pending_moves = list[Step](), list[Move]()
        for step in range(self.rings.nodes):
            hops = self._move(rotation_sends, step, rotating)
            result += spread([hops, *pending_moves], self._attend(step, inner_steps))
            # Sums are sent one step after their tokens, and overlap with the computation of the next step.
            pending_moves = [self._move(ring_reduce_sends, step, sums)] if sums and step else []
        return steps(*result, Step(tuple(pending_moves)))

    def _move(self, token_sends: TokenSends, step: int, payload: Payload) -> Move:
        """Returns the sends of all rings at a step."""

        def sends() -> Iterator[Send]:
            for device, ring in enumerate(self.rings.rings):
                for source, target, count in token_sends(ring, self.rings.grid, step):
                    yield Send(self._rank(source, device), self._rank(target, device), count * payload.size)

        return move("p2p", "nodes", payload.tensors, sends())

    def _attend(self, step: int, inner_steps: Callable[[CommPlan], Steps]) -> Steps:
        """Returns the inner method's steps in all nodes, side by side."""
        devices, by_node = self.rings.devices, list[Steps]()
        for node in range(self.rings.nodes):
            node_step = self.rings.step(node, step)
            if node_step is not None:  # None: no pair of the node's queries and visiting keys is visible
                work = replace(self.work, layout=node_step.layout, key_layout=node_step.key_layout)
                plan = within_node(node_step, inner_steps(self.inner_plan(work)))
                first = self._rank(node, 0)
                by_node.append(renumber(plan, range(first, first + devices), devices * self.rings.nodes))
        return side_by_side(by_node) if by_node else ()

    def _rank(self, node: int, device: int) -> int:
        return node * self.rings.devices + device


def within_node(node_step: NodeStep, inner: Steps) -> Steps:
    """Returns the inner method's steps on axis "devices", with blocks numbered by shards of the whole sequence."""

    def on_devices(moves: Iterable[Move]) -> tuple[Move, ...]:
        return tuple(move._replace(axis="devices") for move in moves)

    # The inner plan numbers the shards of a node from 0; blocks name shards of the whole sequence.
    def global_block(block: Block | None) -> Block | None:
        return None if block is None else (node_step.query_shards[block[0]], node_step.key_shards[block[1]])

    return tuple(
        Step(on_devices(step.moves), step.pairs, on_devices(step.later_moves), tuple(map(global_block, step.blocks)))
        for step in inner
    )


def spread(moves: Iterable[Move], inner: Steps) -> Steps:
    """Returns the inner steps with `moves` in flight during all of them, each step with its share of their bytes."""
    outer_moves = [outer_move for outer_move in moves if outer_move.sends]
    if not inner:
        return (Step(tuple(outer_moves)),) if outer_moves else ()

    def share(outer_move: Move, i: int) -> Move:
        # Differences of rounded multiples, so that the shares add up to all bytes.
        def size(send: Send) -> int:
            return send.bytes * (i + 1) // len(inner) - send.bytes * i // len(inner)

        return outer_move._replace(sends=tuple(send._replace(bytes=size(send)) for send in outer_move.sends))

    return tuple(
        step._replace(moves=(*(share(outer_move, i) for outer_move in outer_moves), *step.moves))
        for i, step in enumerate(inner)
    )


@dataclass(frozen=True)
class DoubleRingPlan(NodeRingPlan):
    """Plan of `Ring(nodes, inner=Ring(devices))`."""

    @property
    def inner(self) -> RingPlan:
        return RingPlan(self.backward)

    def other_node_forward(self, x: Sizes, devices: int) -> float:
        buffers = 2 * x.k * (2 if devices == 2 else 2.5)
        return buffers + 1.5 * x.w * x.q + 3 * x.lse + kernel_forward(x, 0.5)

    def other_node_backward(self, x: Sizes, devices: int) -> float:
        return self.inner.backward_memory(x, devices) + self.wide_query_sums(x, devices)


@dataclass(frozen=True)
class TokenRingOverNodesPlan(NodeRingPlan):
    """Plan of `Ring(nodes, inner=TokenRing(devices))`."""

    @property
    def inner(self) -> TokenRingPlan:
        return TokenRingPlan()
