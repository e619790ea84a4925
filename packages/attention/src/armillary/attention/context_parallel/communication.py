"""Communication between the ranks that share a sequence: gathered integers, sums, and gathered shards.

`TensorCache` keeps what ranks have exchanged about a tensor, such as position ids, for all layers and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention.call.validation import over_all_ranks
from armillary.attention.methods.base import Method
from armillary.core import Axis, SequenceLayout, all_reduce, start_all_gather
from armillary.core.parts import check_tensor, compat

Value = TypeVar("Value")


class TensorCache:
    """Values computed from a tensor, kept until the tensor is changed in place or deleted."""

    def __init__(self) -> None:
        self.entries: Any = WeakTensorKeyDictionary()
        """Tensor -> ((version, key), value)."""

    def get(self, x: Tensor, key: object, compute: Callable[[], Value]) -> Value:
        """Returns the value of `x` for the latest key; computes it if the tensor or the key has changed."""
        if x.is_inference():  # without a version counter, a change in place cannot be noticed
            return compute()
        entry = self.entries.get(x)
        if entry is None or entry[0] != (x._version, key):
            entry = self.entries[x] = (x._version, key), compute()
        return entry[1]


def find_axes(method: Method) -> list[Axis] | None:
    """Returns the axes of more than one rank that a method runs on, innermost first; None if they are unknown."""
    declared_axes: Sequence[Axis] = getattr(method, "axes", ())
    axes = [axis for axis in reversed(declared_axes) if axis.size > 1]
    # A user's method may not declare all of its axes. Then their sizes do not multiply to its number of shards.
    return axes if prod(axis.size for axis in axes) == method.shards else None


def method_axes(method: Method) -> list[Axis]:
    """Returns the axes of a method as `find_axes`; raises ValueError if they are unknown."""
    axes = find_axes(method)
    if axes is None:
        raise ValueError(
            f"{type(method).__name__} does not say which axes its {method.shards} ranks are on, so that they cannot "
            "communicate: give it an `axis`, and `inner` if it contains another method"
        )
    return axes


def sequence_axis(method: Method) -> Axis:
    """Returns one axis with all ranks of a method: for ring x ulysses, both axes flattened into one.

    The first call for a method on several axes creates a process group.

    Raises:
        ValueError: the axes are unknown, belong to no mesh, or order the ranks otherwise than the shards.
    """
    if method.flat_axis is None:
        method.flat_axis = _flat_axis(method)
    return method.flat_axis


def _flat_axis(method: Method) -> Axis:
    axes = method_axes(method)
    if len(axes) < 2:
        return axes[0] if axes else Axis.alone("sequence")
    meshes = [axis.mesh for axis in axes]
    name = type(method).__name__
    if any(mesh is None for mesh in meshes):
        raise ValueError(f"{name}: layers with a state need the mesh of its axes; give it axes of one DeviceMesh")
    flat = Axis.of(compat.flatten_axes([mesh for mesh in meshes if mesh is not None]))
    if flat.rank != method.shard:
        raise ValueError(
            f"{name}: shard {method.shard} is on rank {flat.rank} of its axes together; layers with a state need "
            "shards in the order of the mesh, with ring outside of ulysses"
        )
    return flat


def gather_integers(rows: Sequence[Sequence[int]], method: Method) -> list[list[int]]:
    """Gathers rows of integers from all ranks of a method. All rows have one length; every rank must call this.

    Bytes sent to each other rank of an axis, axis by axis: 8 for the number of rows, and 8 for each integer so far, in
    as many rows as the rank with most has.
    """
    gathered = [list(row) for row in rows]
    for axis in method_axes(method):
        local = torch.tensor(gathered, dtype=torch.int64, device=_device(axis))
        # Ranks may have different numbers of rows, which are exchanged first.
        count = torch.tensor([len(gathered)], device=local.device)
        counts = start_all_gather(count, axis, [1] * axis.size, 0).wait().tolist()
        gathered = start_all_gather(local, axis, counts, 0).wait().tolist()
    return gathered


def sum_over_axes(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Returns the sum of a tensor over all ranks of the axes, the same bits on each. Backward sums the gradient too.

    Bytes sent: an `all_reduce` of x on each axis, and in backward of its gradient. Every rank must call it.
    """
    device = x.device
    # One axis after another, so that all ranks add the same numbers in the same order.
    for axis in axes:
        x = all_reduce(x.to(_device(axis)), axis)
    return x.to(device)


def gather_tokens(x: Tensor, method: Method, layout: SequenceLayout) -> Tensor:
    """Gathers the shards of all ranks in sequence order: [B, T, ...] -> [B, N, ...], without a gradient.

    Args:
        x: [B, T, ...], the shard of this rank.
        layout: layout of the sequence, over all ranks of the method or over its sequence axis.

    Bytes sent, kind "all_gather": on the first axis, of C ranks, C - 1 times the bytes of a shard padded to the longest
    one; on each further axis, of C ranks, C - 1 times the bytes of all shards gathered so far; and a `gather_integers`
    of one integer. Every rank must call it.

    Raises:
        ValueError: x has another number of tokens than this rank's shard.
    """
    check_tensor("x", x)
    layout = over_all_ranks(layout, method)
    if x.ndim < 2 or x.shape[1] != layout.sizes[method.shard]:
        raise ValueError(
            f"x {tuple(x.shape)}: shard {method.shard} of the layout is [B, {layout.sizes[method.shard]}, ...]"
        )
    if method.shards == 1:
        return layout.join([x.detach()])
    # Shards differ in length, and torch gathers tensors of one shape.
    padded = x.new_zeros((x.shape[0], max(layout.sizes), *x.shape[2:]))
    padded[:, : x.shape[1]] = x.detach()
    gathered = padded.unsqueeze(0)
    for axis in method_axes(method):
        gathered = start_all_gather(gathered.to(_device(axis)), axis, [len(gathered)] * axis.size, 0).wait()
    # The gathered order is that of the ranks on the axes; a method may number its shards differently.
    order = [shard for (shard,) in gather_integers([[method.shard]], method)]
    shards = {shard: tokens.to(x.device) for shard, tokens in zip(order, gathered, strict=True)}
    return layout.join([shards[i][:, :size] for i, size in enumerate(layout.sizes)])


def _device(axis: Axis) -> torch.device:
    """Returns the device of tensors that the group of an axis accepts: the host for gloo, the GPU for NCCL."""
    # On CPU meshes `get_backend` is not called: it fails for the groups with several backends that `init_device_mesh`
    # creates.
    if axis.device == "cpu" or dist.get_backend(axis.group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
