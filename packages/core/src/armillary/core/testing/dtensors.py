"""DTensors for tests, with random placements, uneven shards too. Every rank knows their full value.

random = Random(7)                                                    # the same on every rank
placements = draw_placements(random, mesh, dims=(0, 1), fixed={"tp": Shard(2)})
x = place(full, mesh, placements)                                     # does not communicate
assert torch.equal(x.full_tensor(), full)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core.dtensor import chunk_sizes


def draw_placements(
    random: Random,
    mesh: DeviceMesh,
    dims: Sequence[int],
    fixed: Mapping[str, Placement] | None = None,
    partial: bool = False,
) -> tuple[Placement, ...]:
    """Returns a placement for each axis of the mesh: that of `fixed`, or a random one.

    Args:
        random: generator, which must be in the same state on every rank.
        dims: dims of the tensor that may be sharded; a dim may be sharded over several axes.
        fixed: placements by the name of the axis.
        partial: True if random placements may be `Partial`.
    """
    choices = [Replicate(), *(Shard(dim) for dim in dims), *[Partial()] * partial]
    return tuple((fixed or {}).get(name) or random.choice(choices) for name in mesh.mesh_dim_names or [""] * mesh.ndim)


def place(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int = 0) -> DTensor:
    """Returns a DTensor with the value `full`, which every rank passes. Does not communicate.

    On `Partial` axes the ranks have random addends, drawn from `seed`, whose sum is `full` up to rounding.
    """
    local = local_part(addends(full, mesh, placements, seed), mesh, placements)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def local_part(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Returns a copy of this rank's shard of `full`. Like DTensor, cuts by one axis after the other."""
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes, rank = chunk_sizes(full.shape[placement.dim], mesh.size(mesh_dim)), mesh.get_local_rank(mesh_dim)
            full = full.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])
    return full.clone(memory_format=torch.contiguous_format)


def addends(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int = 0) -> Tensor:
    """Returns this rank's random addend of `full`; without a `Partial` axis `full` itself."""
    addend = full
    for mesh_dim, placement in enumerate(placements):
        if placement == Partial():
            # All ranks but the last have random values, and the last rank has the difference to the sum.
            generator = torch.Generator().manual_seed(1000 * seed + mesh_dim)
            shape = mesh.size(mesh_dim) - 1, *full.shape
            noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(full)
            rank = mesh.get_local_rank(mesh_dim)
            addend = noise[rank] if rank < len(noise) else addend - noise.sum(0)
        elif placement.is_partial():
            raise ValueError(f"{placement!r}: only sums have addends")
    return addend
