"""Attention on DTensors: placements are checked, the method attends on local tensors, and DTensors come back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention.compiled import NUMBERED, read_layout
from armillary.attention.mask import AttentionMask
from armillary.attention.spec import AttentionOptions
from armillary.core import Axis, SequenceLayout, compat
from armillary.core.placements import (
    Placed,
    check_chunks,
    check_placement,
    chunk_sizes,
    describe,
    dtensor_like,
    local_of,
    mesh_dim,
)


class TakesLocal(Protocol):
    """Of a method (`methods/base.py`), what a call on DTensors needs."""

    number: int
    shards: int
    sequence_shards: int

    @property
    def axes(self) -> tuple[Axis, ...]: ...


def attend_dtensors(
    method: TakesLocal, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> DTensor | tuple[DTensor, DTensor]:
    """`method(q, k, v, ...)` on DTensors over a mesh with the method's axes, all three placed alike.

    Placements are `Shard(1)` on the axes of the method, outer ones before inner ones in the mesh; so rank r * U + u of
    `ring x ulysses` has chunk r * U + u, as it has shard r * U + u of the layout. Heads may be `Shard(2)` on others
    (tp) that divide H and K, and stay there; the batch may be `Shard(0)`. Global views hold tokens in the order of the
    layout's shards. Gradients come back placed as what they are gradients of.

    Args:
        sinks: [H of this rank], local; or a DTensor [H], `Shard(0)` where heads are sharded and else `Replicate`. The
            gradient of a DTensor is `Partial` wherever batch or tokens are sharded.
        options: the mask is of this rank's rows of the batch, where rows have documents of their own. The shards of
            layouts must be as long as DTensor's own chunks, ceil(N / P) first.

    Returns:
        out [B, N, H, Dv], placed as q; with `return_lse` also lse [B, N, H], likewise. Where it leaves a compiled
        graph, detach it there: torch wants a gradient for every DTensor that comes out and could have one.

    Inside `torch.compile` too, without a break; a graph is for one mesh, placement and shape.

    Raises:
        ValueError: DTensors with others, or placements, shards or heads that do not fit. Raised before any
            communication.
    """
    q, k, v = _all_dtensors(q, k, v)
    tensors = (q, k, v, sinks) if isinstance(sinks, DTensor) else (q, k, v)
    check = _check_traced if torch.compiler.is_compiling() else _check
    check(method, [Placed(x.device_mesh, x.placements, tuple(x.shape)) for x in tensors], options)
    if isinstance(sinks, DTensor):
        sinks = local_of(sinks, _sinks_gradient(q))
    local = local_of(q), local_of(k), local_of(v)
    found = cast(Any, method)(*local, sinks=sinks, **options._asdict())
    out, lse = found if options.return_lse else (found, None)
    out = dtensor_like(q, out, (*q.shape[:3], v.shape[3]))
    return out if lse is None else (out, dtensor_like(q, lse, q.shape[:3]))


def _all_dtensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[DTensor, DTensor, DTensor]:
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join("DTensor" if isinstance(x, DTensor) else "local" for x in (q, k, v))
        raise ValueError(f"q, k, v are {kinds}; pass all three as DTensors or all as local tensors")
    return q, k, v


def _check_traced(method: TakesLocal, found: Sequence[Placed], options: AttentionOptions) -> None:
    """`_check` by Python itself while a graph is traced, which is then one for these meshes, placements and shapes."""
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
        _check(NUMBERED[number], list(found), AttentionOptions(AttentionMask(), *layouts))
    except ValueError as error:
        return str(error)
    return None


def _check(method: TakesLocal, found: Sequence[Placed], options: AttentionOptions) -> None:
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


def _sinks_gradient(q: DTensor) -> list[Placement]:
    """Each rank's gradient is a share of the sum over batch and tokens."""
    known: dict[Placement, Placement] = {Shard(0): Partial(), Shard(1): Partial(), Shard(2): Shard(0)}
    return [known.get(found, Replicate()) for found in q.placements]
