"""The slices of a sharded parameter that a rank has, and a parameter's name without the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

# Parts of parameter names that torch's activation checkpointing and torch.compile insert.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

# A rectangular part of a tensor: a slice for each dim.
Box = tuple[slice, ...]


def local_part(x: Tensor) -> tuple[Tensor, Box]:
    """Returns this rank's shard of x, which may be empty, and the box of the full tensor that it is.

    Raises:
        ValueError: x is a DTensor whose shard is not a box of the full tensor.
    """
    if not isinstance(x, DTensor):
        return x, tuple(slice(0, size) for size in x.shape)
    local, coordinate = x.to_local(), x.device_mesh.get_coordinate()
    if coordinate is None:
        return local, tuple(slice(0, size) for size in local.shape)
    box = box_of(tuple(x.shape), x.device_mesh.shape, tuple(coordinate), x.placements)
    sizes = tuple(dim_slice.stop - dim_slice.start for dim_slice in box)
    if 0 in sizes and not local.numel():  # FSDP2 changes the other sizes of an empty shard
        return local, tuple(slice(0, size) for size in local.shape)
    if local.shape != sizes:
        raise ValueError(f"a rank's shard of a {tuple(x.shape)} with {x.placements} is {tuple(local.shape)}, not {box}")
    return local, box


@lru_cache(maxsize=1024)  # many parameters, and their optimizer state, have the same shape and placements
def box_of(
    shape: tuple[int, ...], ranks: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> Box:
    """Returns the box of the full tensor that the rank at a coordinate has. Raises ValueError if it is not a box."""
    # Mesh axes cut each dim one after the other, as `torch.chunk` cuts.
    box: list[slice] = []
    for dim, size in enumerate(shape):
        start, stop = 0, size
        for axis in cutting_order(dim, len(shape), ranks, placements):
            chunk = -(-(stop - start) // ranks[axis])  # rounded up
            index = coordinate[axis]
            start, stop = min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop)
        box.append(slice(start, stop))
    return tuple(box)


def cutting_order(dim: int, dims: int, ranks: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Returns the mesh axes that cut a dim of a tensor of `dims` dims, in the order in which they cut."""
    order: list[int] = []
    # FSDP2 shards tensors that tensor parallelism has sharded before, and marks them with a `_StridedShard` on its own
    # mesh axis, to the left of the tensor-parallel axis. In `distribute_tensor` and in the offsets of distributed
    # checkpoints, torch (2.11 to 2.15) applies such placements from left to right. That is wrong if tensor parallelism
    # shards unevenly: of 257 rows over 2 ranks and then 4, the last two ranks have 30 and 32, but torch computes 31 and
    # 31. `full_tensor()` applies placements as this function does.
    # Axes cut from left to right, except for a strided shard: it cuts after the axes to its right (tensor parallelism)
    # that have cut the dim into `split_factor` parts.
    # From the last mesh axis to the first, each axis is inserted into the order of the axes to its right.
    for axis in reversed(range(len(ranks))):
        placement = placements[axis]
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(f"{placement}: a parameter must be sharded or replicated")
        if isinstance(placement, Replicate) or placement.dim % dims != dim:
            continue
        # A strided shard (a private class that is not a subclass of `Shard` in some releases) cuts after the first n
        # axes of the order, whose ranks multiply to its `split_factor`; a shard cuts first.
        part_count = getattr(placement, "split_factor", 1)
        candidates = [n for n in range(len(order) + 1) if prod(ranks[a] for a in order[:n]) == part_count]
        if not candidates:
            raise ValueError(f"{tuple(placements)}: {part_count} parts along dim {dim} are cut by no axes to the right")
        order.insert(candidates[0], axis)
    return order


def plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
