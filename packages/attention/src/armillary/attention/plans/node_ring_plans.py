"""Communication and memory of `Ring(nodes, inner=method)`: a ring between nodes, another method within each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from armillary.attention.mask import AttentionMask
from armillary.attention.methods.ring import Backward, check_backward
from armillary.attention.plans.comm_plan import (
    AttentionShape,
    Block,
    CommPlan,
    Move,
    Payload,
    Send,
    Step,
    Steps,
    all_gather,
    move,
    planned_grid,
    reduce_scatter,
    side_by_side,
    steps,
)
from armillary.attention.plans.method_plan import (
    SequencePlan,
    Sizes,
    kernel_forward,
    rotate_keys_backward,
    rotate_keys_forward,
    rotate_queries_backward,
)
from armillary.attention.plans.ring_plans import (
    RingPlan,
    TokenRingPlan,
    TokenSends,
    backward_side,
    ring_backward_memory,
    ring_reduce_sends,
    rotates_queries,
    rotation_sends,
)
from armillary.attention.rings.node_rings import NodeRings, NodeStep
from armillary.attention.rings.topology import RotatingSide
from armillary.attention.tiling.grid import PartialLayout


@dataclass(frozen=True)
class NodeRingPlan(SequencePlan):
    """Plan of a `Ring` on axis "nodes" around an inner method on axis "devices".

    In each of M steps the inner method attends within each node, while keys (or queries) travel to the next node,
    except in the last step.
    Formulas of memory with an inner ring are up to 15% too high for three nodes; those with an inner TokenRing are up
    to 35% too high and 5% too low.

    Args:
        nodes: M; P ranks are M nodes of P / M devices.
        backward: the side that rotates in backward, between nodes and in an inner ring.

    Raises:
        ValueError: an unknown `backward`.
    """

    takes_latents = True  # as the inner methods below
    nodes: int
    backward: Backward = "auto"

    def __post_init__(self) -> None:
        check_backward(self.backward)

    @property
    def inner(self) -> SequencePlan:
        raise self.missing("inner")

    def devices(self, ranks: int) -> int:
        """Returns the devices of a node. Raises ValueError if the nodes do not divide the ranks."""
        if self.nodes < 1 or ranks % self.nodes:
            raise ValueError(f"nodes={self.nodes} must divide the {ranks} ranks of the sequence axis")
        return ranks // self.nodes

    @property
    def balanced_by(self) -> None:
        """None: both sides are made even, and bytes are ignored."""
        return None

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        devices, inner_plan = self.devices(work.layout.shards), cache(self.inner.comm_plan)

        @cache  # if keys rotate in backward too, both passes have the same rings
        def steps_of(side: RotatingSide) -> NodeSteps:
            return NodeSteps(work, NodeRings.of(devices, side, work.grid), inner_plan)

        side, kv = backward_side(work, self.backward), work.payload("k", "v")
        if side == "keys":
            rotating_payload, sums = kv, work.payload("dk", "dv")
        else:
            rotating_payload, sums = work.payload("q", "out", "dout", "lse"), work.payload("dq")
        return CommPlan(
            steps_of("keys").steps(kv, None, lambda plan: plan.forward),
            steps_of(side).steps(rotating_payload, sums, lambda plan: plan.backward),
        )

    def forward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of the first step between nodes or of a later one, with the inner method's peak during that step."""
        devices, inner = self.devices(ranks), self.inner
        if self.nodes == 1:
            return inner.forward_memory(x, devices)
        if devices == 1:
            return rotate_keys_forward(x, ranks)
        # First step: k and v (2 x.k) arrive from another node, and half of the local k and v is copied to be sent.
        arriving_bytes, sent_bytes = 2 * x.k, 2 * x.k * 0.5
        first_step = arriving_bytes + sent_bytes + inner.forward_memory(x, devices)
        # Later steps: k and v in use, k and v that arrive, and a copy of the half that is sent on. With two nodes the
        # second step is the last: nothing arrives or is sent, and the first step's out is still in its own dtype.
        key_copies, out_width = (1, 1) if self.nodes == 2 else (1 + 1 + 0.5, x.w)
        later_step = 2 * x.k * key_copies + out_width * x.out + x.lse + self.other_node_forward(x, devices)
        return max(first_step, later_step)

    def backward_memory(self, x: Sizes, ranks: int) -> float:
        """Peak of a step after the first: shards in flight between nodes, sums of gradients, and the inner method."""
        devices, inner = self.devices(ranks), self.inner
        if self.nodes == 1:
            return inner.backward_memory(x, devices)
        if devices == 1:
            return ring_backward_memory(x, ranks, self.backward)
        # With more than two nodes: one shard in use, one that arrives, and a copy of the half that is sent on; and
        # three sums of its gradients: one that arrives, one in use, one that is sent.
        shard_copies, sum_copies = (1 + 1 + 0.5, 3) if self.nodes > 2 else (1, 1)
        dq_sum, dkv_sums = x.w * x.q, 2 * x.w * x.k
        if rotates_queries(x, self.backward):  # dq travels; dk and dv stay
            outer = x.rotating * shard_copies + dq_sum * sum_copies + dkv_sums
        else:  # dk and dv travel; dq stays
            outer = 2 * x.k * shard_copies + dq_sum + dkv_sums * sum_copies
        return outer + self.other_node_backward(x, devices)

    def other_node_forward(self, x: Sizes, devices: int) -> float:
        """Returns the peak of the inner method's forward with keys of another node."""
        # None of the blocks with keys of another node is causal.
        return self.inner.forward_memory(x, devices) + self.wide_query_sums(x, devices) * x.value_ratio

    def other_node_backward(self, x: Sizes, devices: int) -> float:
        return self.inner.backward_memory(x, devices)

    def wide_query_sums(self, x: Sizes, devices: int) -> float:
        """Returns the extra bytes at the inner method's peak for its sum of out or dq in the accumulation dtype."""
        # The inner formula assumes that the first block covers all queries, so that its result, in the inputs' dtype,
        # serves as the sum. With keys of another node no block does. From three devices on, the inner peak is at a
        # later block, whose sum already has the accumulation dtype.
        return (x.w - 1) * x.q if devices == 2 else 0


@dataclass(frozen=True)
class NodeSteps:
    """Steps of a ring between nodes, on all ranks. During each one every node runs all steps of the inner method."""

    work: AttentionShape
    rings: NodeRings
    inner_plan: Callable[[AttentionShape], CommPlan]

    def steps(self, rotating: Payload, sums: Payload | None, inner_steps: Callable[[CommPlan], Steps]) -> Steps:
        """Returns the steps of forward or backward: `rotating` tensors and `sums` of gradients travel between nodes."""
        result, pending_moves = list[Step](), list[Move]()
        for step in range(self.rings.nodes):
            shard_move = move_between_nodes(self.rings, rotation_sends, step, rotating)
            result += spread([shard_move, *pending_moves], self._attend(step, inner_steps))
            # The sums of a step are sent during the next step. At step 0 each device computes with its node's own
            # shards, whose sums stay.
            pending_moves = [move_between_nodes(self.rings, ring_reduce_sends, step, sums)] if sums and step else []
        return steps(*result, Step(tuple(pending_moves)))

    def _attend(self, step: int, inner_steps: Callable[[CommPlan], Steps]) -> Steps:
        # All nodes run the steps of their inner methods at the same time.
        devices, by_node = self.rings.devices, list[tuple[Steps, range]]()
        for node, node_step in enumerate(self._node_steps[step]):
            if node_step is not None:  # None: no pair of the node's queries and visiting keys is visible
                layout, key_layout = node_step.layout, node_step.key_layout
                plan = self.inner_plan(replace(self.work, layout=layout, key_layout=key_layout))
                ranks = range(node * devices, (node + 1) * devices)
                by_node.append((within_node(node_step, inner_steps(plan)), ranks))
        return side_by_side(by_node, devices * self.rings.nodes)

    @property
    def _node_steps(self) -> list[list[NodeStep | None]]:
        rings, nodes = self.rings, range(self.rings.nodes)
        # Without documents, windows and patterns only the order of positions counts. Most nodes then have equal plans.
        mask = self.work.mask
        only_order_counts = mask == AttentionMask(mask.causal)

        def node_step(node: int, step: int) -> NodeStep | None:
            result = rings.step(node, step)
            return without_gaps(result) if result and only_order_counts else result

        # Plans of calls with other heads share them.
        return self.work.grid.cached(
            ("nodes", rings.devices, rings.rotating_side),
            lambda: [[node_step(node, step) for node in nodes] for step in nodes],
        )


def move_between_nodes(rings: NodeRings, token_sends: TokenSends, step: int, payload: Payload) -> Move:
    """Returns the sends between nodes that start at a step, in the rings of all devices."""
    devices = rings.devices
    sends = (
        Send(source * devices + device, target * devices + device, count * payload.size)
        for device, ring in enumerate(rings.rings)
        for source, target, count in token_sends(ring, rings.grid, step)
    )
    return move("p2p", "nodes", payload.tensors, sends)


RankCalls = tuple[AttentionShape | None, ...]
"""For each rank of a node, the call with its heads only; None for a rank without heads."""


class GatheredLatents:
    """Latents that rotate between P nodes, whose U ranks gather them at each step.

    Nodes are the ring axis here, and the ranks of a node the head axis.

    Args:
        work: the call, with layouts over the nodes.
        ranks: U.
    """

    def __init__(self, work: AttentionShape, ranks: int) -> None:
        layout, key_layout = work.layout.refine(ranks), work.key_layout.refine(ranks)
        grid = planned_grid(work.layout, key_layout, work.mask)
        self.work, self.rings = work, NodeRings(work.layout.shards, ranks, "keys", layout, key_layout, grid)
        nodes = range(self.rings.nodes)
        self.node_steps = [[self.rings.step(node, step) for node in nodes] for step in nodes]

    def ring_plan(self, calls: RankCalls) -> CommPlan:
        """Returns the plan of a `GatheringRing`."""

        def run(is_backward: bool) -> Iterator[Step]:
            for step, node_steps in enumerate(self.node_steps):
                returning = self._return(step - 1) if is_backward else ()
                yield Step(self._within_nodes(all_gather, node_steps, "k", "v"))
                yield self._attend(node_steps, calls)._replace(moves=(self._rotate(step), *returning))
                if is_backward:
                    yield Step(self._within_nodes(reduce_scatter, node_steps, "dk", "dv"))
            yield Step(self._return(self.rings.nodes - 1) if is_backward else ())

        return CommPlan(steps(*run(is_backward=False)), steps(*run(is_backward=True)))

    # The parts of a call of UPipe, which sends latents once for all stages.

    def send(self) -> Steps:
        """Returns the steps before the first stage."""
        gathers = (self._within_nodes(all_gather, node_steps, "k", "v") for node_steps in self.node_steps)
        return steps(*(Step((self._rotate(step), *gather)) for step, gather in enumerate(gathers)))

    def stage_plan(self, calls: RankCalls) -> CommPlan:
        """Returns the plan of a stage: it sends nothing."""
        attend = steps(*(self._attend(node_steps, calls) for node_steps in self.node_steps))
        return CommPlan(attend, attend)

    def return_grads(self) -> Steps:
        """Returns the steps after the last stage of backward."""
        scatters = (self._within_nodes(reduce_scatter, node_steps, "dk", "dv") for node_steps in self.node_steps)
        scatter_steps = (Step((*scatter, *self._return(step - 1))) for step, scatter in enumerate(scatters))
        return steps(*scatter_steps, Step(self._return(self.rings.nodes - 1)))

    def _rotate(self, step: int) -> Move:
        return move_between_nodes(self.rings, rotation_sends, step, self.work.payload("k", "v"))._replace(axis="ring")

    def _return(self, step: int) -> tuple[Move, ...]:
        if step <= 0:  # at step 0 each rank has sums for its own latents, which stay
            return ()
        sums = self.work.payload("dk", "dv")
        return (move_between_nodes(self.rings, ring_reduce_sends, step, sums)._replace(axis="ring"),)

    def _within_nodes(
        self, collective: Callable[..., Move], node_steps: Sequence[NodeStep | None], *names: str
    ) -> tuple[Move, ...]:
        """Returns a collective of each tensor in each node of which a query sees a key."""
        ranks, tokens = self.rings.devices, list[int]()
        for node_step in node_steps:
            tokens += [0] * ranks if node_step is None else node_step.key_layout.sizes
        groups = [range(node * ranks, (node + 1) * ranks) for node, node_step in enumerate(node_steps) if node_step]
        return tuple(collective(groups, tokens, self.work.payload(name))._replace(axis="ulysses") for name in names)

    def _attend(self, node_steps: Sequence[NodeStep | None], calls: RankCalls) -> Step:
        """Returns the computation of a step, without moves."""
        grid, pairs, expanded = self.rings.grid, list[int](), list[int]()
        for node, node_step in enumerate(node_steps):
            shards, tokens = ((), 0) if node_step is None else (node_step.key_shards, sum(node_step.key_layout.sizes))
            node_pairs = sum(grid.pairs(node, shard, self.work.batch) for shard in shards)
            pairs += [0 if call is None else node_pairs * len(call.key_heads) for call in calls]
            expanded += [0 if call is None else call.expanded(tokens) for call in calls]
        return Step(pairs=tuple(pairs), expanded=tuple(expanded))


def within_node(node_step: NodeStep, inner: Steps) -> Steps:
    """Returns the inner method's steps with moves on axis "devices" and blocks of shards of the whole sequence."""

    def on_devices(moves: Iterable[Move]) -> tuple[Move, ...]:
        return tuple(move._replace(axis="devices") for move in moves)

    # The inner plan numbers the shards of a node from 0.
    def global_block(block: Block | None) -> Block | None:
        return None if block is None else (node_step.query_shards[block[0]], node_step.key_shards[block[1]])

    return tuple(
        step._replace(
            moves=on_devices(step.moves),
            later_moves=on_devices(step.later_moves),
            blocks=tuple(map(global_block, step.blocks)),
        )
        for step in inner
    )


def without_gaps(node_step: NodeStep) -> NodeStep:
    """Returns the queries and keys of a node without the gaps between their positions."""
    layouts = node_step.layout, node_step.key_layout
    spans = [span for layout in layouts for shard in layout.spans_by_shard for span in shard]
    end, shift, shifts = 0, 0, dict[int, int]()  # end of the spans so far; shift of a span, by its start
    for start, stop in sorted((span.start, span.stop) for span in spans):
        shift += max(0, start - end)
        end, shifts[start] = max(end, stop), shift

    def close_gaps(layout: PartialLayout) -> PartialLayout:
        def move_span(span: range) -> range:
            return range(span.start - shifts[span.start], span.stop - shifts[span.start], span.step)

        return PartialLayout((map(move_span, shard) for shard in layout.spans_by_shard), layout.length)

    return node_step._replace(layout=close_gaps(node_step.layout), key_layout=close_gaps(node_step.key_layout))


def spread(moves: Iterable[Move], inner: Steps) -> Steps:
    """Returns the inner steps with moves between nodes in flight during all of them."""
    outer_moves = [outer_move for outer_move in moves if outer_move.sends]
    if not inner:
        return (Step(tuple(outer_moves)),) if outer_moves else ()

    def share(outer_move: Move, i: int) -> Move:
        # Step i has the bytes between i / n and (i + 1) / n of the send, both rounded down: all steps add up to it.
        def size(send: Send) -> int:
            return send.bytes * (i + 1) // len(inner) - send.bytes * i // len(inner)

        return outer_move._replace(sends=tuple(send._replace(bytes=size(send)) for send in outer_move.sends))

    # Each of the inner steps has an equal share of the bytes.
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
        # Half of the queries see all keys of another node, so the inner ring sends whole shards on. At its first step:
        # a copy of k and v to be sent, and k and v that arrive. Later: k and v in use, which are sent from where they
        # are, and k and v that arrive. The terms of the merge are those of `rotate_keys_forward`.
        block, merge_bytes = kernel_forward(x, 0.5), x.w * x.out + x.lse
        return (1 + 1) * 2 * x.k + merge_bytes + block + (x.w * x.out + x.lse) / 2 + x.expansion

    def other_node_backward(self, x: Sizes, devices: int) -> float:
        if rotates_queries(x, self.backward):
            inner = rotate_queries_backward(x, devices, direct=False, onward=1)
        else:
            inner = rotate_keys_backward(x, devices, onward=1, casts_dq=False)
        return inner + self.wide_query_sums(x, devices)


@dataclass(frozen=True)
class TokenRingOverNodesPlan(NodeRingPlan):
    """Plan of `Ring(nodes, inner=TokenRing(devices))`."""

    @property
    def inner(self) -> TokenRingPlan:
        return TokenRingPlan()
