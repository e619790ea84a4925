"""Which part of a tensor a rank holds, computed without communication."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.core import compat
from armillary.models.hub.tensors import Box


def local_part(x: Tensor) -> tuple[Tensor, Box]:
    """What this rank holds of x, and where that lies in the whole. It may be empty.

    Raises:
        ValueError: a `DTensor` whose placements say that a rank's part is no box of the whole.
    """
    if not isinstance(x, DTensor):
        return x, tuple(slice(0, size) for size in x.shape)
    local = x.to_local()
    box = tuple(held(x, dim) for dim in range(x.ndim))
    if local.shape != tuple(part.stop - part.start for part in box):
        raise ValueError(f"a rank's part of a {tuple(x.shape)} with {x.placements} is {tuple(local.shape)}, not {box}")
    return local, box


def held(x: DTensor, dim: int) -> slice:
    """What this rank holds along one dim: cut by one mesh axis after the other, as `torch.chunk` cuts."""
    mesh, coordinate = x.device_mesh, x.device_mesh.get_coordinate()
    start, stop = 0, x.shape[dim]
    if coordinate is None:
        return slice(0, 0)
    for axis in cutting_order(x, dim):
        size = -(-(stop - start) // mesh.size(axis))
        start, stop = min(start + coordinate[axis] * size, stop), min(start + (coordinate[axis] + 1) * size, stop)
    return slice(start, stop)


def cutting_order(x: DTensor, dim: int) -> list[int]:
    """The mesh axes that cut a dim, first to last.

    That is from left to right, but for a strided shard: FSDP2 cuts what tensor parallelism, to its right, has cut
    already into `split_factor` parts.
    """
    order: list[int] = []
    for axis in reversed(range(x.device_mesh.ndim)):
        cut, parts = compat.shard(x.placements[axis])
        if cut is None or cut % x.ndim != dim:
            continue
        before = [n for n in range(len(order) + 1) if prod(x.device_mesh.size(a) for a in order[:n]) == parts]
        if not before:
            raise ValueError(f"{x.placements}: {parts} parts along dim {dim} are cut by no axes to the right")
        order.insert(before[0], axis)
    return order
