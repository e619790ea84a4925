"""DTensors for tests: placements drawn at random, uneven shards included, and DTensors of what every rank can compute.

random = Random(7)                                                    # the same on every rank
placed = draw_placements(random, mesh, dims=(0, 1), fixed={"tp": Shard(2)})
x = place(whole, mesh, placed)                                        # sends nothing
assert torch.equal(x.full_tensor(), whole)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core.shards import box_of


def draw_placements(
    random: Random,
    mesh: DeviceMesh,
    dims: Sequence[int],
    fixed: Mapping[str, Placement] | None = None,
    partial: bool = False,
) -> tuple[Placement, ...]:
    """A placement for each axis of the mesh: on those in `fixed` that one, on others any.

    Args:
        random: in the same state on every rank.
        dims: which dims of the tensor may be sharded; over several axes too.
        partial: whether sums may be pending.
    """
    choices = [Replicate(), *(Shard(dim) for dim in dims), *[Partial()] * partial]
    return tuple((fixed or {}).get(name) or random.choice(choices) for name in mesh.mesh_dim_names or [""] * mesh.ndim)


def place(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int = 0) -> DTensor:
    """A DTensor that stands for `whole`, which every rank has, made without communication.

    Where `Partial`, ranks have random shares of it, made from `seed`, which add up to `whole` but for rounding.
    """
    local = local_part(shares(whole, mesh, placements, seed), mesh, placements)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def local_part(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this rank holds of `whole`: cut by one axis after the other, as DTensor does; a copy."""
    cuts = [Replicate() if placement.is_partial() else placement for placement in placements]
    coordinate = [mesh.get_local_rank(place) for place in range(mesh.ndim)]
    return whole[box_of(whole.shape, mesh.shape, coordinate, cuts)].clone(memory_format=torch.contiguous_format)


def shares(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int = 0) -> Tensor:
    """This rank's share of `whole`: itself where no sum is pending, else one of those that add up to it."""
    share = whole
    for place, placement in enumerate(placements):
        if placement == Partial():
            draw = torch.Generator().manual_seed(1000 * seed + place)
            others = torch.randn(mesh.size(place) - 1, *whole.shape, generator=draw, dtype=torch.float64).to(whole)
            rank = mesh.get_local_rank(place)
            share = others[rank] if rank < len(others) else share - others.sum(0)
        elif placement.is_partial():
            raise ValueError(f"{placement!r}: shares can be made of sums only")
    return share
