"""Rings between the nodes of a cluster, and the tokens that meet within a node at each of their steps. Pure.

Rank n D + d is device d of node n. At every step the D devices of a node hold one rotating shard each, and attend as a
group: all stationary shards of the node against all rotating ones.

    step              0        1           2 nodes of 2 devices, with keys rotating
    node 0 has     k0  k1    k2  k3        each step: send k0 and k1 on to the next node while all queries of the
    node 1 has     k2  k3    k0  k1        node attend to them
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from armillary.attention.rotation.topology import RingTopology, RotatingSide
from armillary.attention.tiling.grid import Grid, grid_of
from armillary.attention.tiling.partial_layout import PartialLayout, spans_at
from armillary.core import SequenceLayout


class NodeStep(NamedTuple):
    """Queries and keys that meet in one node at one step.

    Args:
        layout, key_layout: their tokens, by device.
        query_shards, key_shards: the shards of the full sequence that these tokens belong to, by device.
    """

    layout: PartialLayout
    key_layout: PartialLayout
    query_shards: tuple[int, ...]
    key_shards: tuple[int, ...]


@dataclass(frozen=True)
class NodeRings:
    """D rings of M nodes: ring d connects device d of every node.

    Args:
        nodes, devices: M and D.
        rotating_side: the side that travels between nodes.
        layout, key_layout: layouts over all M D ranks.
        grid: visible pairs of a node's stationary tokens with each rotating shard.
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
        """The ring of each device, in its cheaper direction. Ranks are nodes."""
        nodes, rank_count = tuple(range(self.nodes)), self.nodes * self.devices
        shards = [tuple(range(device, rank_count, self.devices)) for device in range(self.devices)]
        return tuple(
            RingTopology(nodes, nodes, rotating_shards, self.rotating_side).cheaper_direction(self.grid)
            for rotating_shards in shards
        )

    def step(self, node: int, step: int) -> NodeStep | None:
        """Returns the queries and keys that meet in a node at a step; None if they do not see each other."""
        keys_rotate = self.rotating_side == "keys"
        rotating_layout, stationary_layout = (
            (self.key_layout, self.layout) if keys_rotate else (self.layout, self.key_layout)
        )
        own_shards = tuple(range(node * self.devices, (node + 1) * self.devices))
        # One visiting shard per device's ring, cut to the tokens that are still travelling.
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
