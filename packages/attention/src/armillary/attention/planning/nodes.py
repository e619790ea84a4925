"""Plans of a `Ring` between nodes around a method on the devices of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from armillary.attention.methods.ring import Backward, cheaper_side, check_backward
from armillary.attention.planning.base import RingWalk, SequencePlan
from armillary.attention.planning.comm_plan import (
    AttentionShape,
    CommPlan,
    Move,
    Role,
    Step,
    Steps,
    move,
    renumber,
    side_by_side,
    steps,
)
from armillary.attention.planning.ring import RingPlan
from armillary.attention.planning.rotation import ReturnedTokens, hop_tokens, ring_reduce_tokens
from armillary.attention.planning.token_ring import TokenRingPlan
from armillary.attention.rotation.nodes import NodeRings
from armillary.core import SequenceLayout
from armillary.core.network import Send


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

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        devices, kv = self.devices(work.layout.shards), work.k + work.v
        forward = NodeSteps(work, NodeRings.of(devices, "keys", work.grid), self.inner.comm_plan)
        queries = (work.layout.length, len(work.key_heads), work.head_dim)
        keys = (work.key_layout.length, work.kv_heads, work.value_dim)
        side = cheaper_side(self.backward, queries, keys, work.dtype)
        backward = NodeSteps(work, NodeRings.of(devices, side, work.grid), self.inner.comm_plan)
        if side == "keys":
            hop_bytes, sum_bytes = kv * work.e, kv * work.a  # k and v; dk and dv
        else:
            hop_bytes, sum_bytes = (work.q + 2 * work.out) * work.e + work.lse * work.a, work.q * work.a
        return CommPlan(
            forward.steps(hop_bytes=kv * work.e, sum_bytes=0, inner_steps=lambda plan: plan.forward),
            backward.steps(hop_bytes, sum_bytes, inner_steps=lambda plan: plan.backward),
        )

    def walk(self, layout: SequenceLayout) -> RingWalk:
        """One ring of all ranks: the blocks of a rank, if not in their order."""
        return RingWalk.of_ring(layout, "keys")


@dataclass(frozen=True)
class NodeSteps:
    """Steps of a ring between nodes on all ranks, each made of the inner method's steps in every node.

    Args:
        inner_plan: plan of the inner method for the queries and keys that meet in a node.
    """

    work: AttentionShape
    rings: NodeRings
    inner_plan: Callable[[AttentionShape], CommPlan]

    def steps(self, hop_bytes: int, sum_bytes: int, inner_steps: Callable[[CommPlan], Steps]) -> Steps:
        """Returns the steps of forward or backward.

        Args:
            hop_bytes: bytes of a token that travels between nodes.
            sum_bytes: bytes of a token's gradient sum that follows it one step behind.
            inner_steps: takes forward or backward of the inner plan.
        """
        result, following = list[Step](), list[Move]()
        for step in range(self.rings.nodes):
            hops = self._move(hop_tokens, step, hop_bytes)
            sums = self._move(ring_reduce_tokens, step, sum_bytes if step else 0)
            result += spread([hops, *following], self._attend(step, inner_steps))
            following = [sums]
        return steps(*result, Step(tuple(following)))

    def _move(self, tokens: ReturnedTokens, step: int, size: int) -> Move:
        """Sends of all rings at a step, of `size` bytes a token."""

        def sends() -> Iterator[Send]:
            for device, ring in enumerate(self.rings.rings):
                for source, target, count in tokens(ring, self.rings.grid, step):
                    yield Send(self._rank(source, device), self._rank(target, device), count * size)

        return move("p2p", "nodes", sends())

    def _attend(self, step: int, inner_steps: Callable[[CommPlan], Steps]) -> Steps:
        """The inner method's steps in all nodes, side by side."""
        devices, by_node = self.rings.devices, list[Steps]()
        for node in range(self.rings.nodes):
            meeting = self.rings.step(node, step)
            if meeting is not None:
                work = replace(self.work, layout=meeting.layout, key_layout=meeting.key_layout)
                plan = on_axis("devices", inner_steps(self.inner_plan(work)))
                first = self._rank(node, 0)
                by_node.append(renumber(plan, range(first, first + devices), devices * self.rings.nodes))
        return side_by_side(by_node) if by_node else ()

    def _rank(self, node: int, device: int) -> int:
        return node * self.rings.devices + device


def on_axis(axis: Role, inner: Steps) -> Steps:
    """Returns the steps with all moves on `axis`."""

    def moved(moves: Iterable[Move]) -> tuple[Move, ...]:
        return tuple(each._replace(axis=axis) for each in moves)

    return tuple(Step(moved(step.moves), step.pairs, moved(step.later_moves)) for step in inner)


def spread(moves: Iterable[Move], inner: Steps) -> Steps:
    """Returns the inner steps with `moves` in flight during all of them, each step with its share of their bytes."""
    moves = [each for each in moves if each.sends]
    if not inner:
        return (Step(tuple(moves)),) if moves else ()

    def share(each: Move, i: int) -> Move:
        def size(send: Send) -> int:
            return send.bytes * (i + 1) // len(inner) - send.bytes * i // len(inner)

        return each._replace(sends=tuple(send._replace(bytes=size(send)) for send in each.sends))

    return tuple(
        step._replace(moves=(*(share(each, i) for each in moves), *step.moves)) for i, step in enumerate(inner)
    )


@dataclass(frozen=True)
class DoubleRingPlan(NodeRingPlan):
    """Plan of `Ring(nodes, inner=Ring(devices))`."""

    @property
    def inner(self) -> RingPlan:
        return RingPlan(self.backward)


@dataclass(frozen=True)
class TokenRingOverNodesPlan(NodeRingPlan):
    """Plan of `Ring(nodes, inner=TokenRing(devices))`."""

    @property
    def inner(self) -> TokenRingPlan:
        return TokenRingPlan()
