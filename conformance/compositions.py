"""The tested methods by name, with the meshes that each supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionShape, CommPlan, Method, Ring, WallFacer, build_attention, build_comm_plan
from armillary.attention.internal import ALIASES, HEAD_METHODS, SEQUENCE_METHODS, Placement, names
from armillary.attention.methods.ring import Backward
from armillary.attention.plans import RingPlan, WallFacerPlan
from armillary.core.internal import compat, dtensor
from armillary.core.mesh import ALL_AXES
from armillary.core.testing import mesh

Axes = Mapping[str, int]
Meshes = Callable[[int], Iterable[Axes]]
Build = Callable[[DeviceMesh], Method]
PlanFunction = Callable[[AttentionShape, Axes], CommPlan]
"""Returns the communication plan of a call on a mesh with these axes."""


class MethodUnderTest(NamedTuple):
    """A tested method: its meshes for a number of ranks, its constructor, and its communication plan."""

    meshes: Meshes
    build: Build
    comm_plan: PlanFunction


def on_one_rank(ranks: int) -> Iterable[Axes]:
    """Returns the mesh of a single rank."""
    return [{}] if ranks == 1 else []


def on_one_axis(axis: str, min_ranks: int = 2) -> Meshes:
    """Returns a function from a number of ranks, at least `min_ranks`, to the mesh with all of them on one axis."""
    return lambda ranks: [{axis: ranks}] if ranks >= min_ranks else []


def ring_by_ulysses(ranks: int) -> Iterable[Axes]:
    """Returns every ring x ulysses mesh with several ranks on both axes."""
    return [{"ring": ring, "ulysses": ranks // ring} for ring in range(2, ranks) if ranks % ring == 0]


def over_nodes(ranks: int) -> Iterable[Axes]:
    """Returns every nodes x devices mesh with several ranks on both axes. On two ranks, one axis has one rank."""
    smallest = 1 if ranks == 2 else 2
    splits = [(nodes, ranks // nodes) for nodes in range(smallest, ranks // smallest + 1) if ranks % nodes == 0]
    return [{"nodes": nodes, "devices": devices} for nodes, devices in splits]


def over_nodes_and_heads(ranks: int) -> Iterable[Axes]:
    """Returns each mesh of `over_nodes` with a third axis, `ulysses`, of several ranks."""
    heads = [ulysses for ulysses in range(2, ranks) if ranks % ulysses == 0]
    return [{**axes, "ulysses": ulysses} for ulysses in heads for axes in over_nodes(ranks // ulysses)]


def teams(team: int) -> Meshes:
    """Returns a function from a number of ranks to the mesh with all of them on `ring`, if teams of this size fit."""
    return lambda ranks: [{"ring": ranks}] if ranks > 1 and ranks % team**2 == 0 else []


def meshes_of(name: str) -> Meshes:
    """Returns the meshes of a method of `build_attention`."""
    if name == "local":
        return on_one_rank
    *_, sequence = ALIASES.get(name, name).partition("+")
    if name in SEQUENCE_METHODS:
        return over_nodes if "nodes" in SEQUENCE_METHODS[name].axes else on_one_axis("ring", min_ranks=1)
    if sequence in SEQUENCE_METHODS and "nodes" in SEQUENCE_METHODS[sequence].axes:
        return over_nodes_and_heads
    return on_one_axis("ulysses", min_ranks=1) if name in HEAD_METHODS else ring_by_ulysses


def ring(backward: Backward) -> MethodUnderTest:
    """Ring with a fixed rotating side in backward."""

    def build(mesh: DeviceMesh) -> Method:
        return Ring(mesh["ring"], backward)

    def comm_plan(work: AttentionShape, _: Axes) -> CommPlan:
        return RingPlan(backward).comm_plan(work)

    return MethodUnderTest(on_one_axis("ring"), build, comm_plan)


def wallfacer(
    team: int, placement: Placement, backward: Backward = "auto", gather_keys: bool = True
) -> MethodUnderTest:
    """WallFacer with these options."""

    def build(mesh: DeviceMesh) -> Method:
        return WallFacer(mesh["ring"], team, placement, backward, gather_keys)

    def comm_plan(work: AttentionShape, _: Axes) -> CommPlan:
        return WallFacerPlan(team, placement, backward, gather_keys).comm_plan(work)

    return MethodUnderTest(teams(team), build, comm_plan)


def named(name: str) -> MethodUnderTest:
    """The method that `build_attention` builds."""

    def comm_plan(work: AttentionShape, axes: Axes) -> CommPlan:
        return build_comm_plan(name, work, work.layout.shards, axes.get("ulysses", 1), nodes=axes.get("nodes"))

    return MethodUnderTest(meshes_of(name), partial(build_attention, name), comm_plan)


METHODS: dict[str, MethodUnderTest] = {
    **{name: named(name) for name in names() if name != "ulysses+ring"},
    "ring-keys": ring("keys"),
    "ring-queries": ring("queries"),
    "wallfacer-1": wallfacer(1, "collect_intra"),
    "wallfacer-2": wallfacer(2, "collect_intra"),
    "wallfacer-2-p2p": wallfacer(2, "p2p_intra"),
    "wallfacer-2-keys": wallfacer(2, "collect_intra", "keys", gather_keys=False),
    "wallfacer-2-queries": wallfacer(2, "p2p_intra", "queries", gather_keys=False),
    "wallfacer-4-keys": wallfacer(4, "p2p_intra", "keys"),
    "wallfacer-4-queries": wallfacer(4, "collect_intra", "queries", gather_keys=False),
}
"""Every method of `build_attention`, and methods with options. To add one to the suite, add a line."""


@dataclass(frozen=True)
class Composition:
    """A method of `METHODS` on a mesh of these axes."""

    method: str
    axes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, method: str, **axes: int) -> Composition:
        return cls(method, tuple(axes.items()))

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return prod(size for _, size in self.axes)

    @property
    def shards(self) -> int:
        """Number of ranks on the sequence axes."""
        return prod(size for axis, size in self.axes if axis in dtensor.SEQUENCE_AXES)

    def mesh(self, device: str = "cpu") -> DeviceMesh:
        """Returns the mesh of all ranks of the world, or of its last ranks. Created once per process."""
        axes = dict(self.axes)
        if dist.is_initialized() and dist.get_world_size() > self.ranks:
            return submesh(device, **axes)
        return mesh(**axes, device=device)

    def dtensor_mesh(self, device: str = "cpu") -> DeviceMesh:
        """Returns the mesh of the named axes only: on all five axes, DTensor takes minutes to find placements."""
        mesh, names = self.mesh(device), tuple(axis for axis, _ in self.axes)
        return mesh[names or ("ring",)]

    def build(self, device: str = "cpu") -> Method:
        """Returns the method on this rank, which must be in `mesh`. Created once per process."""
        return built_method(self, device)

    def comm_plan(self, work: AttentionShape) -> CommPlan:
        """Returns the communication plan for `work`, over the shards of the sequence axis."""
        return METHODS[self.method].comm_plan(work, dict(self.axes))

    def __str__(self) -> str:
        return "-".join([self.method, *(f"{axis}{size}" for axis, size in self.axes)])


@cache
def built_method(composition: Composition, device: str) -> Method:
    return METHODS[composition.method].build(composition.mesh(device))


@cache
def submesh(device: str, **axes: int) -> DeviceMesh:
    """Returns a mesh of the last ranks of the world. Axes of the same ranks share a process group and its thread."""
    names = [name for name in ALL_AXES if name not in ("pipe", "replicate")]
    sizes = [axes.get(name, 1) for name in names]
    ranks = torch.arange(dist.get_world_size() - prod(sizes), dist.get_world_size()).view(sizes)
    # For each axis, the ranks on the line along this axis through this rank.
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    lines = [ranks[(*place[:dim], slice(None), *place[dim + 1 :])] for dim in range(ranks.ndim)]
    groups = [group_of(tuple(line.tolist())) for line in lines]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(names))


@cache
def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Returns the group of these ranks, including this one. All of them must call it."""
    return compat.new_group(ranks, f"conformance {' '.join(map(str, ranks))}", None)


def compositions(methods: Sequence[str], ranks: Sequence[int]) -> list[Composition]:
    """Returns every method on each of its meshes with these numbers of ranks, small meshes first."""
    return [
        Composition.of(method, **axes) for size in ranks for method in methods for axes in METHODS[method].meshes(size)
    ]
