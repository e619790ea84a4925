"""For functions of DTensors: checks of their arguments' placements, and their results as DTensors.

A sequence shard is `Shard(1)`, a head shard `Shard(2)`. The global view of a sequence-sharded DTensor has the tokens in
shard order, which is not sequence order in a zigzag layout. Shards have the sizes of DTensor's chunks (`chunk_sizes`).
Results and gradients have explicit placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from armillary.core import compat
from armillary.core.mesh import Axis


class Placed(NamedTuple):
    """Mesh, placements and global shape of a DTensor, for checks without the tensor."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


def chunk_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Returns DTensor's shard sizes, as torch.chunk cuts: ceil(length / ranks) each, then the remainder.

    The last shards may be empty: 9 over 4 ranks is 3, 3, 3, 0.
    """
    chunk = -(-length // ranks)
    return tuple(max(0, min(chunk, length - rank * chunk)) for rank in range(ranks))


def check_chunks(name: str, sizes: Sequence[int], expected: Sequence[int], axis: str) -> None:
    """Raises ValueError unless the shard sizes over an axis are those of DTensor's chunks.

    Args:
        name: noun for the sizes in the error, such as "sizes" or "heads".
        sizes: shard size of each rank.
        expected: sizes of DTensor's chunks.
        axis: name of the axis.
    """
    if tuple(sizes) != tuple(expected):
        raise ValueError(
            f"{name} {tuple(sizes)} over axis {axis!r} are not the shards of a DTensor, which cuts {sum(expected)} as "
            f"{tuple(expected)} (torch.chunk); choose a size that divides, or pass local tensors"
        )


def mesh_dim(x: DTensor | Placed, axis: Axis) -> int:
    """Returns the dim of the mesh of `x` that is the axis.

    Raises:
        ValueError: the mesh has no axis of this name, or its axis of this name has other ranks.
    """
    names = x.device_mesh.mesh_dim_names or ()
    if axis.name not in names:
        raise ValueError(f"the DTensor's mesh has axes {names}; axis {axis.name!r} is not one of them")
    dim = names.index(axis.name)
    if Axis.of(x.device_mesh[axis.name]).ranks() != axis.ranks():
        raise ValueError(f"axis {axis.name!r} of the DTensor's mesh is over other ranks than {axis.ranks()}")
    return dim


def check_placement(name: str, x: DTensor | Placed, dim: int, expected: Placement) -> None:
    """Raises ValueError unless the placement of `x` on mesh dim `dim` is `expected`. On one rank, accepts any."""
    placement = x.placements[dim]
    if placement != expected and x.device_mesh.size(dim) > 1:
        axis = (x.device_mesh.mesh_dim_names or ())[dim]
        raise ValueError(f"{name} is {placement!r} on axis {axis!r} of {describe(x)}; it must be {expected!r} there")


def check_other_axes(name: str, x: DTensor | Placed, dim: int) -> None:
    """Raises ValueError if `x` is partial, or sharded with a stride, on a mesh dim other than `dim`."""
    for mesh_dim, placement in enumerate(x.placements):
        if mesh_dim != dim and not (placement == Replicate() or type(placement) is Shard):
            axis = (x.device_mesh.mesh_dim_names or ())[mesh_dim]
            raise ValueError(
                f"{name} is {placement!r} on axis {axis!r} of {describe(x)}; it must be Shard or Replicate there"
            )


def check_innermost(name: str, x: DTensor | Placed, mesh_dim: int, dim: int) -> None:
    """Raises ValueError if a mesh dim inside `mesh_dim` shards tensor dim `dim` too."""
    # Then shards of neighbouring ranks on `mesh_dim` would not be adjacent in the tensor.
    names = x.device_mesh.mesh_dim_names or ()
    for inner in range(mesh_dim + 1, x.device_mesh.ndim):
        if x.placements[inner] == Shard(dim) and x.device_mesh.size(inner) > 1:
            raise ValueError(
                f"dim {dim} of {name} is sharded over axis {names[inner]!r} inside axis {names[mesh_dim]!r} of "
                f"{describe(x)}; only the innermost axis of a dim can be gathered or cut"
            )


def outer_length(x: DTensor | Placed, dim: int, mesh_dim: int) -> int:
    """Returns the size of tensor dim `dim` on this rank after the mesh dims outside `mesh_dim` have cut it."""
    length = x.shape[dim]
    for outer in range(mesh_dim):
        if x.placements[outer] == Shard(dim):
            mesh = x.device_mesh
            length = chunk_sizes(length, mesh.size(outer))[mesh.get_local_rank(outer)]
    return length


def local_of(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """Returns this rank's shard of `x`, a local tensor.

    Args:
        grad_placements: placements of the gradient of `x`. By default those of `x`, with `Replicate` for `Partial` as
            is torch's convention.
    """
    if grad_placements is None:
        grad_placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
    return compat.to_local(x, grad_placements)


def dtensor_like(
    x: DTensor, local: Tensor, shape: Sequence[int], changed: dict[int, Placement] | None = None
) -> DTensor:
    """Returns the DTensor of global `shape` whose shard on this rank is `local`, on the mesh of `x`.

    The gradient has the placements of the result.

    Args:
        changed: by mesh dim, the placements that differ from those of `x`.
    """
    placements = [(changed or {}).get(mesh_dim, old) for mesh_dim, old in enumerate(x.placements)]
    return from_local(local, x.device_mesh, placements, shape)


def from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Returns the DTensor of global `shape` whose shard on this rank is `local`. Does not communicate."""
    # Without shape and stride, DTensor.from_local assumes that the shards of all ranks have the size of this one.
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def describe(x: DTensor | Placed) -> str:
    """Formats `x` for messages: `DTensor [2, 8, 4, 16] over (ring Shard(dim=1), tp Shard(dim=2))`."""
    names = x.device_mesh.mesh_dim_names or [f"#{i}" for i in range(x.device_mesh.ndim)]
    placements = ", ".join(f"{name} {placement!r}" for name, placement in zip(names, x.placements, strict=True))
    return f"DTensor {list(x.shape)} over ({placements})"
