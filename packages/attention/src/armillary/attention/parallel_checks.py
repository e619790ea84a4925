"""What is refused of a call on DTensors: placements, heads and shards that do not fit, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import index
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

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


def check_call(method: TakesLocal, tensors: Mapping[str, DTensor], options: AttentionOptions) -> None:
    """Refuses what does not fit; by Python itself while a graph is traced, which is then one for all that was checked.

    Args:
        tensors: by name: q, k and v, or x and the parameters of projections; and sinks.

    Raises:
        ValueError: with the placement that is wanted.
    """
    found = {name: Placed(x.device_mesh, x.placements, tuple(x.shape)) for name, x in tensors.items()}
    if not torch.compiler.is_compiling():
        return _check(method, found, options)
    layout, key_layout = (x.text if x is not None else "" for x in (options.layout, options.key_layout))
    meshes, placements = [x.device_mesh for x in found.values()], [x.placements for x in found.values()]
    shapes = [[index(size) for size in x.shape] for x in found.values()]  # numbers, not symbols of them
    said = _refusal(index(method.number), layout, key_layout, list(found), meshes, placements, shapes)
    if said is not None:
        raise ValueError(said)
    return None


@compat.constant_when_traced
def _refusal(
    number: int,
    layout: str,
    key_layout: str,
    names: Sequence[str],
    meshes: Sequence[DeviceMesh],
    placements: Sequence[tuple[Placement, ...]],
    shapes: Sequence[Sequence[int]],
) -> str | None:
    found = map(Placed, map(compat.traced_object, meshes), placements, map(tuple, shapes))
    layouts = (read_layout(layout), read_layout(key_layout))
    try:
        _check(NUMBERED[number], dict(zip(names, found, strict=True)), AttentionOptions(AttentionMask(), *layouts))
    except ValueError as error:
        return str(error)
    return None


def _check(method: TakesLocal, found: Mapping[str, Placed], options: AttentionOptions) -> None:
    """Placements, heads and shards that fit each other, the method and the layouts."""
    if "x" in found:
        _check_hidden(method, found, options.layout)
        return
    q, k, v = (found[name] for name in "qkv")
    shown = ", ".join(f"{name} {describe(found[name])}" for name in "qkv")
    if any(x.device_mesh != q.device_mesh or x.placements != q.placements for x in (k, v)):
        raise ValueError(f"{shown}: all three must be placed alike on one mesh")
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise ValueError(f"{shown}: each needs 4 dims, [batch, tokens, heads, head dim]")
    check_tokens("q", q, method, options.layout, (Shard(0), Shard(2), Replicate()))
    _check_heads(q, k)
    _check_shards(k, method, options.layout if options.key_layout is None else options.key_layout)
    if "sinks" in found:
        _check_sinks(found["sinks"], "q", q)


def _check_hidden(method: TakesLocal, found: Mapping[str, Placed], layout: SequenceLayout | None) -> None:
    """x, what projections are made of, and sinks as heads are sharded by these."""
    x, parameters = found["x"], {name: its for name, its in found.items() if name not in ("x", "sinks")}
    check_tokens("x", x, method, layout, (Shard(0), Replicate()))
    for name, its in parameters.items():
        _check_parameter(f"{name} of projections", its, x)
    if "sinks" in found:
        heads = x._replace(placements=placed_heads(x, parameters.values()))
        _check_sinks(found["sinks"], "heads", heads)


def _check_parameter(name: str, its: Placed, x: Placed) -> None:
    """On axes of the mesh of x: whole where x is sharded, elsewhere whole or cut evenly."""
    axes = its.device_mesh.mesh_dim_names or ("",)
    if not set(axes) <= set(x.device_mesh.mesh_dim_names or ()):
        raise ValueError(
            f"{name} is {describe(its)} and x is {describe(x)}; it must lie on axes of the mesh of x, Replicate() "
            f"where x is sharded, or be a plain tensor"
        )
    for place, axis in enumerate(axes):
        found, ranks = its.placements[place], its.device_mesh.size(place)
        there = x.placements[mesh_dim(x, Axis.of(its.device_mesh[axis]))]
        if isinstance(there, Shard) or not isinstance(found, Shard):
            check_placement(name, its, place, Replicate())
        elif its.shape[found.dim] % ranks:
            raise ValueError(f"{name} is {describe(its)}; its heads must be sharded evenly over {ranks} ranks")


def placed_heads(x: Placed | DTensor, parameters: Iterable[Placed | DTensor]) -> tuple[Placement, ...]:
    """How heads that are made of x lie: as x does, and sharded on the axes on which parameters are."""
    cut = {
        name
        for its in parameters
        for name, found in zip(its.device_mesh.mesh_dim_names or (), its.placements, strict=True)
        if isinstance(found, Shard)
    }
    names = x.device_mesh.mesh_dim_names or ()
    return tuple(
        Shard(2) if name in cut and placed == Replicate() else placed
        for name, placed in zip(names, x.placements, strict=True)
    )


def check_tokens(
    name: str,
    x: Placed | DTensor,
    method: TakesLocal,
    layout: SequenceLayout | None,
    others: Sequence[Placement],
) -> None:
    """Tokens [B, N, ...] sharded over the method's axes and over no others, in shards as long as the layout's.

    Args:
        others: placements that will do on the other axes of the mesh.

    Raises:
        ValueError: with the placement that is wanted.
    """
    axes = _sharding_axes(method)
    places = [mesh_dim(x, axis) for axis in axes]
    for place in places:
        check_placement(name, x, place, Shard(1))
    wanted = [axis.name for axis in axes]
    if places != sorted(places):
        raise ValueError(
            f"the mesh of {name} has axes {x.device_mesh.mesh_dim_names}; {wanted} must come in this order"
        )
    for place, found in enumerate(x.placements):
        if place in places or x.device_mesh.size(place) == 1 or found in others:
            continue
        axis = (x.device_mesh.mesh_dim_names or ())[place]
        *most, last = map(repr, others)
        raise ValueError(
            f"{name} is {found!r} on axis {axis!r} of {describe(x)}; the method works on axes {wanted}, and on "
            f"others only {', '.join(most)} and {last} will do"
        )
    _check_shards(x, method, layout)


def _sharding_axes(method: TakesLocal) -> list[Axis]:
    """Those of several ranks, outermost first."""
    return [axis for axis in method.axes if axis.size > 1]


def _check_heads(q: Placed, k: Placed) -> None:
    """Query and key/value heads cut evenly, so that the ones of a group stay together."""
    ranks = prod(q.device_mesh.size(i) for i, found in enumerate(q.placements) if found == Shard(2))
    if q.shape[2] % ranks or k.shape[2] % ranks:
        raise ValueError(
            f"{q.shape[2]} query and {k.shape[2]} key/value heads of {describe(q)} are sharded over {ranks} "
            f"ranks, which must divide both"
        )


def _check_shards(x: Placed | DTensor, method: TakesLocal, layout: SequenceLayout | None) -> None:
    """The layout's shards as long as the DTensor's. A layout over other ranks is left to the method to refuse."""
    if layout is None or layout.shards not in (method.shards, method.sequence_shards):
        return
    sizes, axes = [x.shape[1]], _sharding_axes(method)
    for axis in axes:
        sizes = [size for whole in sizes for size in chunk_sizes(whole, axis.size)]
    found = over_all_ranks(layout, method).sizes
    check_chunks("the layout's shards", found, sizes, " x ".join(axis.name for axis in axes))


def over_all_ranks(layout: SequenceLayout, method: TakesLocal) -> SequenceLayout:
    """The layout as the ranks of the method hold it: where it is over the sequence axis alone, each shard cut again."""
    if layout.shards == method.shards or layout.shards != method.sequence_shards:
        return layout
    return layout.refine(method.shards // method.sequence_shards)


def _check_sinks(sinks: Placed, name: str, x: Placed) -> None:
    """Raises ValueError for sinks that are not placed as the heads of x are."""
    heads = Shard(len(sinks.shape) - 1)
    placements: list[Placement] = [heads if found == Shard(2) else Replicate() for found in x.placements]
    if sinks.device_mesh != x.device_mesh or any(
        found != wanted and sinks.device_mesh.size(place) > 1
        for place, (found, wanted) in enumerate(zip(sinks.placements, placements, strict=True))
    ):
        raise ValueError(f"sinks are {describe(sinks)}; with {name} {describe(x)} they must be {placements}")
