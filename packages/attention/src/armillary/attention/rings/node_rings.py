"""Rings between the nodes of a cluster, and the queries and keys that a node has at each step.

With m devices per node, rank n m + d is device d of node n. Device d of every node is in ring d. At each step every
device has a stationary and a rotating shard, and the devices of a node compute attention together: all queries in the
node over all keys in it. Meanwhile device d sends its rotating shard to device d of the next node. With 2 nodes of 2
devices and rotating keys:

    step              0        1
    node 0 has     k0  k1    k2  k3
    node 1 has     k2  k3    k0  k1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from armillary.attention.call.spec import AttentionMethod, AttentionSpec, Saved
from armillary.attention.rings.topology import RingTopology, RotatingSide
from armillary.attention.tiling.accumulators import EVERYTHING, Merge, Sum
from armillary.attention.tiling.grid import Grid, PartialLayout, grid_of, spans_at
from armillary.attention.tiling.latents import Expansion
from armillary.core import SequenceLayout


class NodeStep(NamedTuple):
    """The queries and keys in one node at one step.

    Args:
        layout, key_layout: the positions of the queries and of the keys on each device of the node.
        query_shards, key_shards: for each device, the shard of the call's layout to which its queries or keys belong.
    """

    layout: PartialLayout
    key_layout: PartialLayout
    query_shards: tuple[int, ...]
    key_shards: tuple[int, ...]


@dataclass(frozen=True)
class NodeRings:
    """The rings of a call between nodes: ring d connects device d of every node.

    Args:
        nodes: number of nodes.
        devices: number of devices of a node.
        rotating_side: the side that rotates between nodes.
        layout, key_layout: layouts over all devices of all nodes.
        grid: visible pairs of each node and each rotating shard. The stationary shards of a node are one shard here.
    """

    nodes: int
    devices: int
    rotating_side: RotatingSide
    layout: SequenceLayout
    key_layout: SequenceLayout
    grid: Grid

    @classmethod
    def of(cls, devices: int, rotating_side: RotatingSide, grid: Grid) -> NodeRings:
        """Returns the rings for a call.

        Args:
            grid: visible pairs of the shards of all ranks.
        """
        layout, key_layout, nodes = grid.layout, grid.key_layout, grid.layout.shards // devices
        if rotating_side == "keys":
            by_node = grid_of(layout.coarsen(devices), key_layout, grid.mask)
        else:
            by_node = grid_of(layout, key_layout.coarsen(devices), grid.mask)
        return cls(nodes, devices, rotating_side, layout, key_layout, by_node)

    @cached_property
    def rings(self) -> tuple[RingTopology, ...]:
        """The ring of each device, in the direction that sends fewer tokens. The ranks of a ring are nodes."""
        nodes, rank_count = tuple(range(self.nodes)), self.nodes * self.devices
        shards = [tuple(range(device, rank_count, self.devices)) for device in range(self.devices)]
        return tuple(
            RingTopology(nodes, nodes, rotating_shards, self.rotating_side).cheaper_direction(self.grid)
            for rotating_shards in shards
        )

    def attention(self, method: AttentionMethod, node: int, step: int, spec: AttentionSpec) -> NodeAttention:
        """Returns the attention of a node at a step, by a method over its devices.

        Args:
            spec: the spec of the call of all nodes.
        """
        node_step = self.step(node, step)
        if node_step is None:
            return NodeAttention(method, None)
        return NodeAttention(method, replace(spec, layout=node_step.layout, key_layout=node_step.key_layout))

    def step(self, node: int, step: int) -> NodeStep | None:
        """Returns the queries and keys in a node at a step; None if no query sees a key."""
        keys_rotate = self.rotating_side == "keys"
        rotating_layout, stationary_layout = (
            (self.key_layout, self.layout) if keys_rotate else (self.layout, self.key_layout)
        )
        own_shards = tuple(range(node * self.devices, (node + 1) * self.devices))
        # The rotating shard that visits each device, without the tokens that no rank sees at this step or later.
        visiting_shards, visiting_spans, visible_count = list[int](), list[list[range]](), 0
        for ring in self.rings:
            index = ring.ranks.index(node)
            origin = ring.origin(index, step)
            shard, tokens = ring.rotating_shards[origin], ring.reach(self.grid)[origin].tokens_at(step)
            visiting_shards.append(shard)
            visiting_spans.append(list(spans_at(rotating_layout.spans(shard), tokens)))
            visible_count += ring.visible_tokens(self.grid, index, origin).count
        if not visible_count:
            return None
        visiting_tokens = PartialLayout(visiting_spans, rotating_layout.length), tuple(visiting_shards)
        resident_tokens = PartialLayout(map(stationary_layout.spans, own_shards), stationary_layout.length), own_shards
        (layout, query_shards), (key_layout, key_shards) = (
            (resident_tokens, visiting_tokens) if keys_rotate else (visiting_tokens, resident_tokens)
        )
        return NodeStep(layout, key_layout, query_shards, key_shards)


class NodeAttention(NamedTuple):
    """A `RingBlock` of a whole node: attention of the queries and keys that are in the node at one step.

    Args:
        method: the inner method, over the devices of the node.
        spec: the method's spec for this step; None if no query in the node sees a key in it.
        expansion: of the keys, if latents rotate.
    """

    method: AttentionMethod
    spec: AttentionSpec | None
    expansion: Expansion | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, accumulator: Merge) -> None:
        if self.spec is not None:
            out, saved = self.method.forward(q, k, v, self.spec, *self._expansion)
            accumulator.add(EVERYTHING, out, saved.lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Sum, dk: Sum, dv: Sum
    ) -> None:
        if self.spec is not None:
            # out and lse are over the keys of all nodes, so the step computes exactly its part of dq, dk and dv.
            grads = self.method.backward(dout, Saved(q, k, v, out, lse), self.spec, *self._expansion)
            for total, grad in zip((dq, dk, dv), grads, strict=True):
                total.add(EVERYTHING, grad)

    @property
    def _expansion(self) -> tuple[Expansion, ...]:
        return () if self.expansion is None else (self.expansion,)
