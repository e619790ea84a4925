"""The tables of the registry: one line for each attention method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.methods.all_gather import AllGatherKV
from armillary.attention.methods.base import Method
from armillary.attention.methods.local import Local
from armillary.attention.methods.ring import Backward, Ring
from armillary.attention.methods.teams import Placement, fitting_teams
from armillary.attention.methods.token_ring import TokenRing
from armillary.attention.methods.ulysses import Ulysses
from armillary.attention.methods.upipe import UPipe
from armillary.attention.methods.wallfacer import WallFacer
from armillary.attention.planning.heads import UlyssesPlan, UPipePlan
from armillary.attention.planning.method_plan import SequencePlan
from armillary.attention.planning.nodes import DoubleRingPlan, TokenRingOverNodesPlan
from armillary.attention.planning.rings import AllGatherPlan, LocalPlan, RingPlan, TokenRingPlan, WallFacerPlan
from armillary.attention.registry.entry import HeadEntry, MethodOptions, SequenceEntry


def wallfacer_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields each team size from 2, in both placements. With teams of 1 rank the method is Ring."""
    for team in fitting_teams(ranks)[1:]:
        for placement in get_args(Placement):
            yield MethodOptions(team=team, placement=placement)


def largest_team(ranks: int) -> MethodOptions:
    """Returns the largest team size that fits the number of ranks."""
    return MethodOptions(team=fitting_teams(ranks)[-1])


def double_ring(nodes: DeviceMesh, devices: DeviceMesh, backward: Backward) -> Method:
    """Returns a ring of keys between nodes around a ring within each node (LoongTrain's double ring)."""
    return Ring(nodes, backward, inner=Ring(devices, backward))


def token_ring_over_nodes(nodes: DeviceMesh, devices: DeviceMesh, backward: Backward) -> Method:
    """Returns a ring of keys between nodes around TokenRing within each node."""
    return Ring(nodes, backward, inner=TokenRing(devices))


def node_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields each number of nodes that leaves at least 2 nodes of at least 2 devices.

    With one node the method is the inner one, and with one device it is Ring.
    """
    return (MethodOptions(nodes=nodes) for nodes in range(2, ranks // 2 + 1) if ranks % nodes == 0)


def fewest_nodes(ranks: int) -> MethodOptions:
    """Returns the smallest number of nodes above 1 that divides the ranks; 1 for one rank."""
    return MethodOptions(nodes=next((n for n in range(2, ranks + 1) if ranks % n == 0), 1))


def upipe_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields one and two query heads per rank and stage, as far as that makes several stages."""
    return (MethodOptions(heads_per_stage=count) for count in (ranks, 2 * ranks) if count < heads)


def one_head_per_rank(ranks: int) -> MethodOptions:
    """Returns one query head per rank and stage: the least memory."""
    return MethodOptions(heads_per_stage=ranks)


def ulysses(axis: DeviceMesh, inner: Method) -> Method:
    """Returns Ulysses around the inner method; the inner method itself on a head axis of one rank."""
    return Ulysses(axis, inner) if axis.size() > 1 else inner


def over_nodes(method: Callable[..., Method], plan: type[SequencePlan]) -> SequenceEntry:
    """Returns the entry of a method that is a ring between nodes around another method within each node."""
    return SequenceEntry(
        method,
        plan,
        options=("backward",),
        mesh_options=("nodes",),
        defaults=fewest_nodes,
        variants=node_variants,
        axes=("nodes", "devices"),
    )


SEQUENCE_METHODS: dict[str, SequenceEntry] = {
    "ring": SequenceEntry(Ring, RingPlan, options=("backward",)),
    "token_ring": SequenceEntry(TokenRing, TokenRingPlan),
    "wallfacer": SequenceEntry(
        WallFacer,
        WallFacerPlan,
        options=("team", "placement", "backward"),
        defaults=largest_team,
        variants=wallfacer_variants,
    ),
    "all_gather": SequenceEntry(AllGatherKV, AllGatherPlan),
    "ring+ring": over_nodes(double_ring, DoubleRingPlan),
    "ring+token_ring": over_nodes(token_ring_over_nodes, TokenRingOverNodesPlan),
}
HEAD_METHODS: dict[str, HeadEntry] = {
    "ulysses": HeadEntry(ulysses, UlyssesPlan),
    "upipe": HeadEntry(
        UPipe,
        UPipePlan,
        options=("heads_per_stage",),
        defaults=one_head_per_rank,
        variants=upipe_variants,
    ),
}
LOCAL = SequenceEntry(Local, LocalPlan, axes=())
"""The sequence method on one rank. Also the inner method of a head method if there is no sequence axis."""
ALIASES = {"usp": "ulysses+ring"}
