"""What is refused of a call on DTensors: placements, heads and shards that do not fit, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from armillary.attention.compiled import NUMBERED, read_layout
from armillary.attention.mask import AttentionMask
from armillary.attention.spec import AttentionOptions
from armillary.core import Axis, SequenceLayout, compat
from armillary.core.placements import Placed, check_chunks, check_placement, chunk_sizes, describe, mesh_dim


class TakesLocal(Protocol):
    """Of a method (`methods/base.py`), what a call on DTensors needs."""

    number: int
    shards: int
    sequence_shards: int

    @property
    def axes(self) -> tuple[Axis, ...]: ...


def check_traced(method: TakesLocal, found: Sequence[Placed], options: AttentionOptions) -> None:
    """`check_placed` by Python itself while a graph is traced, then for these meshes and placements."""
    layout, key_layout = (x.text if x is not None else "" for x in (options.layout, options.key_layout))
    meshes, placements = [x.device_mesh for x in found], [x.placements for x in found]
    shapes = [[index(size) for size in x.shape] for x in found]  # numbers, not symbols of them
    said = _refusal(index(method.number), layout, key_layout, meshes, placements, shapes)
    if said is not None:
        raise ValueError(said)


@compat.constant_when_traced
def _refusal(
    number: int,
    layout: str,
    key_layout: str,
    meshes: Sequence[DeviceMesh],
    placements: Sequence[tuple[Placement, ...]],
    shapes: Sequence[Sequence[int]],
) -> str | None:
    found = map(Placed, map(compat.traced_object, meshes), placements, map(tuple, shapes))
    layouts = (read_layout(layout), read_layout(key_layout))
    try:
        check_placed(NUMBERED[number], list(found), AttentionOptions(AttentionMask(), *layouts))
    except ValueError as error:
        return str(error)
    return None


def check_placed(method: TakesLocal, found: Sequence[Placed], options: AttentionOptions) -> None:
    """Placements, heads and shards of q, k, v and maybe sinks that fit each other, the method and the layouts."""
    q, k, v, *sinks = found
    shown = ", ".join(f"{name} {describe(x)}" for name, x in zip("qkv", (q, k, v), strict=True))
    if any(x.device_mesh != q.device_mesh or x.placements != q.placements for x in (k, v)):
        raise ValueError(f"{shown}: all three must be placed alike on one mesh")
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise ValueError(f"{shown}: each needs 4 dims, [batch, tokens, heads, head dim]")
    axes = [axis for axis in method.axes if axis.size > 1]
    _check_placements(q, axes)
    _check_heads(q, k)
    key_layout = options.layout if options.key_layout is None else options.key_layout
    for x, its in ((q, options.layout), (k, key_layout)):
        _check_shards(x, method, axes, its)
    for each in sinks:
        _check_sinks(each, q)


def _check_placements(q: Placed, axes: Sequence[Axis]) -> None:
    """Tokens sharded over the method's axes and over no others, in the order of its shards."""
    places = [mesh_dim(q, axis) for axis in axes]
    for place in places:
        check_placement("q", q, place, Shard(1))
    wanted = [axis.name for axis in axes]
    if places != sorted(places):
        raise ValueError(f"the mesh of q has axes {q.device_mesh.mesh_dim_names}; {wanted} must come in this order")
    for place, found in enumerate(q.placements):
        if place in places or q.device_mesh.size(place) == 1 or found in (Replicate(), Shard(0), Shard(2)):
            continue
        name = (q.device_mesh.mesh_dim_names or ())[place]
        raise ValueError(
            f"q is {found!r} on axis {name!r} of {describe(q)}; the method works on axes {wanted}, and on "
            f"others only Shard(dim=0), Shard(dim=2) and Replicate() will do"
        )


def _check_heads(q: Placed, k: Placed) -> None:
    """Query and key/value heads cut evenly, so that the ones of a group stay together."""
    ranks = prod(q.device_mesh.size(i) for i, found in enumerate(q.placements) if found == Shard(2))
    if q.shape[2] % ranks or k.shape[2] % ranks:
        raise ValueError(
            f"{q.shape[2]} query and {k.shape[2]} key/value heads of {describe(q)} are sharded over {ranks} "
            f"ranks, which must divide both"
        )


def _check_shards(x: Placed, method: TakesLocal, axes: Sequence[Axis], layout: SequenceLayout | None) -> None:
    """The layout's shards as long as the DTensor's. A layout over other ranks is left to the method to refuse."""
    if layout is None or layout.shards not in (method.shards, method.sequence_shards):
        return
    fine = layout if layout.shards == method.shards else layout.refine(method.shards // method.sequence_shards)
    sizes = [x.shape[1]]
    for axis in axes:
        sizes = [size for whole in sizes for size in chunk_sizes(whole, axis.size)]
    check_chunks("the layout's shards", fine.sizes, sizes, " x ".join(axis.name for axis in axes))


def _check_sinks(sinks: Placed, q: Placed) -> None:
    """Placed as the heads of q are."""
    placements: list[Placement] = [Shard(0) if found == Shard(2) else Replicate() for found in q.placements]
    if sinks.device_mesh != q.device_mesh or any(
        found != wanted and sinks.device_mesh.size(place) > 1
        for place, (found, wanted) in enumerate(zip(sinks.placements, placements, strict=True))
    ):
        raise ValueError(f"sinks are {describe(sinks)}; with q {describe(q)} they must be {placements}")
