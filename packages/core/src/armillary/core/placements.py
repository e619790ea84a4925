"""Where DTensors come in and go out: their placements are checked, the work is done on local tensors.

Every tensor that leaves has explicit placements, and so has every gradient that goes back. A sequence shard is
`Shard(1)`, a head shard `Shard(2)`. The global view of a sequence-sharded DTensor is the sequence in the order in which
the ranks hold it, so that of a zigzag layout is permuted. DTensor itself says how long each shard is (`chunk_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from armillary.core.mesh import Axis


class Placed(NamedTuple):
    """How a DTensor lies: what there is to check, without the tensor."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


def chunk_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """How DTensor cuts `length` in shards, as torch.chunk does: chunks of ceil(length / ranks), then what is left.

    Later shards may be empty: 9 over 4 is 3, 3, 3, 0.
    """
    chunk = -(-length // ranks)
    return tuple(max(0, min(chunk, length - rank * chunk)) for rank in range(ranks))


def check_chunks(what: str, sizes: Sequence[int], expected: Sequence[int], axis: str) -> None:
    """Refuses shard sizes other than DTensor's own.

    Raises:
        ValueError: with both.
    """
    if tuple(sizes) != tuple(expected):
        raise ValueError(
            f"{what} {tuple(sizes)} over axis {axis!r} are not the shards of a DTensor, which cuts {sum(expected)} as "
            f"{tuple(expected)} (torch.chunk); choose a size that divides, or pass local tensors"
        )


def mesh_dim(x: DTensor | Placed, axis: Axis) -> int:
    """Which dim of the mesh of `x` the axis is.

    Raises:
        ValueError: the mesh has no axis of that name, or one over other ranks.
    """
    names = x.device_mesh.mesh_dim_names or ()
    if axis.name not in names:
        raise ValueError(f"the DTensor's mesh has axes {names}; axis {axis.name!r} is not one of them")
    place = names.index(axis.name)
    if Axis.of(x.device_mesh[axis.name]).ranks() != axis.ranks():
        raise ValueError(f"axis {axis.name!r} of the DTensor's mesh is over other ranks than {axis.ranks()}")
    return place


def check_placement(name: str, x: DTensor | Placed, place: int, expected: Placement) -> None:
    """Refuses `x` unless it is placed as `expected` on dim `place` of its mesh. On one rank any placement will do.

    Raises:
        ValueError: naming the axis and both placements.
    """
    found = x.placements[place]
    if found != expected and x.device_mesh.size(place) > 1:
        axis = (x.device_mesh.mesh_dim_names or ())[place]
        raise ValueError(f"{name} is {found!r} on axis {axis!r} of {describe(x)}; it must be {expected!r} there")


def check_others(name: str, x: DTensor | Placed, place: int) -> None:
    """Refuses, on every axis but `place`, sums that are pending and shards of shards that torch would call private.

    Raises:
        ValueError: naming the axis.
    """
    for other, found in enumerate(x.placements):
        if other != place and not (found == Replicate() or type(found) is Shard):
            axis = (x.device_mesh.mesh_dim_names or ())[other]
            raise ValueError(
                f"{name} is {found!r} on axis {axis!r} of {describe(x)}; it must be Shard or Replicate there"
            )


def check_innermost(name: str, x: DTensor | Placed, place: int, dim: int) -> None:
    """Refuses an axis that another one within it divides further: its neighbours' shards would not be neighbours.

    Raises:
        ValueError: naming both axes.
    """
    names = x.device_mesh.mesh_dim_names or ()
    for inner in range(place + 1, x.device_mesh.ndim):
        if x.placements[inner] == Shard(dim) and x.device_mesh.size(inner) > 1:
            raise ValueError(
                f"dim {dim} of {name} is sharded over axis {names[inner]!r} inside axis {names[place]!r} of "
                f"{describe(x)}; only the innermost axis of a dim can be gathered or cut"
            )


def held_length(x: DTensor | Placed, dim: int, place: int) -> int:
    """How much of `dim` the ranks along mesh dim `place` hold together: what the axes outside it leave."""
    length = x.shape[dim]
    for outer in range(place):
        if x.placements[outer] == Shard(dim):
            mesh = x.device_mesh
            length = chunk_sizes(length, mesh.size(outer))[mesh.get_local_rank(outer)]
    return length


def local_of(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's part of `x`. Its gradient comes back placed as `grad_placements`, by default as `x` is.

    Where `x` is partial the gradient is `Replicate`, which is what torch gives those.
    """
    if grad_placements is None:
        grad_placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
    return x.to_local(grad_placements=grad_placements)


def dtensor_like(
    x: DTensor, local: Tensor, shape: Sequence[int], changed: dict[int, Placement] | None = None
) -> DTensor:
    """The DTensor of global `shape` whose part on this rank is `local`, on the mesh of `x` and placed as `x` is.

    Args:
        changed: other placements, by dim of the mesh. A gradient comes back with the placements of the result.
    """
    placements = [(changed or {}).get(place, old) for place, old in enumerate(x.placements)]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def describe(x: DTensor | Placed) -> str:
    """`DTensor [2, 8, 4, 16] over (ring Shard(dim=1), tp Shard(dim=2))`, for messages."""
    names = x.device_mesh.mesh_dim_names or [f"#{i}" for i in range(x.device_mesh.ndim)]
    placed = ", ".join(f"{name} {found!r}" for name, found in zip(names, x.placements, strict=True))
    return f"DTensor {list(x.shape)} over ({placed})"
