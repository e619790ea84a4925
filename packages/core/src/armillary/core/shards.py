"""Which part of a sharded tensor a rank holds, computed without communication.

FSDP2 cuts the part that tensor parallelism has left, and says so with a strided shard. torch (2.11 to 2.15) reads such
placements from left to right in `distribute_tensor` and in the offsets of its checkpoints (DCP): where tensor
parallelism cuts unevenly, that is not what the rank holds. Of 257 rows over 2 and then 4, the last ranks have 30 and
32, and torch says 31 and 31. `full_tensor()` reads them as they are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from armillary.core import compat

Box = tuple[slice, ...]


def local_part(x: Tensor) -> tuple[Tensor, Box]:
    """What this rank holds of x, and where that lies in the whole. It may be empty.

    Raises:
        ValueError: a `DTensor` whose placements say that a rank's part is no box of the whole.
    """
    if not isinstance(x, DTensor):
        return x, tuple(slice(0, size) for size in x.shape)
    local, coordinate = x.to_local(), x.device_mesh.get_coordinate()
    if coordinate is None:
        return local, tuple(slice(0, size) for size in local.shape)
    box = box_of(x.shape, x.device_mesh.shape, coordinate, x.placements)
    sizes = tuple(part.stop - part.start for part in box)
    if 0 in sizes and not local.numel():  # of an empty part FSDP2 keeps no other size
        return local, tuple(slice(0, size) for size in local.shape)
    if local.shape != sizes:
        raise ValueError(f"a rank's part of a {tuple(x.shape)} with {x.placements} is {tuple(local.shape)}, not {box}")
    return local, box


def box_of(
    shape: Sequence[int], ranks: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """What the rank at a coordinate holds: dims are cut by one mesh axis after the other, as torch.chunk cuts.

    Args:
        shape: of the whole.
        ranks: of each mesh axis.
        placements: on each mesh axis.

    Raises:
        ValueError: placements by which a part is no box.
    """
    box: list[slice] = []
    for dim, size in enumerate(shape):
        start, stop = 0, size
        for axis in cutting_order(dim, len(shape), ranks, placements):
            chunk = -(-(stop - start) // ranks[axis])
            start, stop = (min(start + turn * chunk, stop) for turn in (coordinate[axis], coordinate[axis] + 1))
        box.append(slice(start, stop))
    return tuple(box)


def cutting_order(dim: int, dims: int, ranks: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The mesh axes that cut a dim, first to last.

    That is from left to right, but for a strided shard: FSDP2 cuts what tensor parallelism, to its right, has cut
    already into `split_factor` parts.
    """
    order: list[int] = []
    for axis in reversed(range(len(ranks))):
        cut, parts = compat.shard(placements[axis])
        if cut is None or cut % dims != dim:
            continue
        before = [n for n in range(len(order) + 1) if prod(ranks[a] for a in order[:n]) == parts]
        if not before:
            raise ValueError(f"{tuple(placements)}: {parts} parts along dim {dim} are cut by no axes to the right")
        order.insert(before[0], axis)
    return order
