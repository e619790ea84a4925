"""Sequences as DTensors that are sharded by a layout: `distribute_sequence`, `sequence_from_local`, `gather_sequence`.

    x = distribute_sequence(ids, layout, mesh["ring", "ulysses"])   # [B, N] on every rank -> Shard(1) over both axes
    logits = gather_sequence(model(x), layout)                      # -> [B, N, V], in sequence order, on every rank

In between, the global view of a DTensor is the sequence in shard order: the tokens of shard 0, then of shard 1, and so
on. torch's `full_tensor()` and `redistribute` do not know layouts and keep this order, which is sequence order only in
a contiguous layout. Ops that do not mix tokens give the same values in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from armillary.core.layout import SequenceLayout
from armillary.core.placements import check_chunks, chunk_sizes, describe, from_local
from armillary.core.validation import check_tensor, integer

SEQUENCE_AXES = ("nodes", "devices", "ring", "ulysses")
"""Names of the axes that shard the sequence in a mesh of `build_mesh`."""


def distribute_sequence(
    x: Tensor, layout: SequenceLayout, mesh: DeviceMesh, dim: int = 1, *, axes: Sequence[str] | None = None
) -> DTensor:
    """Returns the DTensor of a tensor that all ranks have: `Shard(dim)` on the sequence axes, in the order of `layout`.

    Rank (r, u) of sequence axes of P x U ranks holds `layout.take(x, r * U + u, dim)`. On all other axes of the mesh
    the result is `Replicate`, which `redistribute` can shard by batch or heads without communication. `full_tensor()`
    of the result has the tokens in shard order; `gather_sequence` returns `x`. Forward does not communicate.

    Differentiable: every rank gets the gradient of the full `x`, which torch gathers as in `full_tensor`.

    Args:
        x: local [..., N, ...], N = `layout.length` on `dim`; any dtype.
        layout: a layout over all ranks of the sequence axes. If the innermost axis is `ulysses`, also a layout over the
            axes outside it, which is then refined over `ulysses`. Its shards must have the sizes of DTensor's chunks:
            10 tokens on 4 ranks are 3, 3, 3, 1 in a DTensor but 3, 3, 2, 2 in zigzag, which is refused.
        mesh: the mesh of the result, usually the model's, such as `mesh["ring", "ulysses", "tp"]`. Leave out axes that
            shard nothing: at the first call of an op on a mesh of five axes, even of one rank each, torch (2.15)
            searches all placements, which takes seconds to minutes.
        dim: dim of the tokens; counted from the end if negative.
        axes: names of the mesh axes that shard the sequence. By default those in `SEQUENCE_AXES`; all axes of the mesh
            if it has none of these, or if the layout has a shard for every rank of the mesh.

    Raises:
        ValueError: an unknown dim or axis, another length, another number of shards, or shards of other sizes than
            DTensor's chunks. Raised before any communication.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed")
    if isinstance(x, DTensor):
        raise ValueError("x is a DTensor; the full local tensor is needed, as x.full_tensor() returns it")
    dim = _check_tokens(x, layout, dim)
    mesh_dims, rank_layout, expected, axes_name = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", rank_layout.sizes, expected, axes_name)
    # Every rank has all of x, so it reorders and cuts x locally. `redistribute` also gathers the gradient in backward.
    in_shard_order = x.index_select(dim, shard_order(rank_layout).to(x.device))
    return _redistribute_by_dim(
        DTensor.from_local(in_shard_order, mesh, [Replicate()] * mesh.ndim), mesh_dims, Shard(dim)
    )


def sequence_from_local(
    x: Tensor,
    layout: SequenceLayout,
    mesh: DeviceMesh,
    dim: int = 1,
    *,
    axes: Sequence[str] | None = None,
    rows: Sequence[str] = (),
) -> DTensor:
    """Returns the DTensor of `distribute_sequence` from this rank's shard of the sequence.

    For loaders that read only the tokens of their rank. No communication; the gradient is that of the local shard.

    Args:
        x: [..., T, ...] with the tokens of this rank's shard on `dim`.
        layout, mesh, dim, axes: as in `distribute_sequence`.
        rows: names of mesh axes over which the batch is sharded evenly, B rows per rank: `Shard(0)` on these axes.

    Raises:
        ValueError: as in `distribute_sequence`; also if the number of tokens is not the size of this rank's shard, or
            if an axis of `rows` is not in the mesh or shards the sequence.
    """
    check_tensor("x", x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    dim %= x.ndim
    mesh_dims, rank_layout, expected, axes_name = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", rank_layout.sizes, expected, axes_name)
    shard = 0  # DTensor cuts dim by dim, so the last mesh dim varies fastest
    for mesh_dim in mesh_dims:
        shard = shard * mesh.size(mesh_dim) + mesh.get_local_rank(mesh_dim)
    if x.shape[dim] != (tokens := rank_layout.sizes[shard]):
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; shard {shard} has {tokens}")
    names = mesh.mesh_dim_names or ()
    row_dims = [mesh_dim for mesh_dim, name in enumerate(names) if name in rows and mesh_dim not in mesh_dims]
    # Fewer dims than names: a name is unknown or shards the sequence.
    if len(row_dims) != len(rows) or (row_dims and dim == 0):
        raise ValueError(
            f"rows={tuple(rows)}, tokens on dim {dim}: rows are dim 0, over axes of {names} other than {axes_name}"
        )
    placements = [
        Shard(dim) if i in mesh_dims else Shard(0) if i in row_dims else Replicate() for i in range(mesh.ndim)
    ]
    shape = list(x.shape)
    shape[dim] = layout.length
    shape[0] *= prod(mesh.size(mesh_dim) for mesh_dim in row_dims)
    return from_local(x, mesh, placements, shape)


def is_cut_by_dtensor(layout: SequenceLayout, mesh: DeviceMesh, axes: Sequence[str] | None = None) -> bool:
    """Returns True if the layout's shards have the sizes of DTensor's chunks, which the functions above require."""
    _, rank_layout, expected, _ = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
    return rank_layout.sizes == expected


def gather_sequence(
    x: DTensor, layout: SequenceLayout, dim: int | None = None, *, grad_placements: Sequence[Placement] | None = None
) -> Tensor:
    """Returns the full tensor in sequence order, on every rank, from a DTensor with tokens in the order of `layout`.

    The inverse of `distribute_sequence`: `full_tensor()`, reordered. Sums partial values and gathers shards on every
    axis. Differentiable like `full_tensor`. Uneven shards over several axes are gathered correctly even if the mesh has
    also been flattened, where `full_tensor` may be wrong (pytorch#194457).

    Args:
        x: a DTensor with any placements, N = `layout.length` on the dim of the tokens.
        layout: the layout of its tokens.
        dim: dim of the tokens. By default the dim of size N that is sharded over a sequence axis; otherwise over any
            axis; otherwise the only dim of size N.
        grad_placements: placements of the result's gradient, as in `full_tensor`. By default `Replicate` on every axis:
            every rank has the full gradient. `Partial` if each rank has an addend of it.

    Bytes sent: as torch's `redistribute`, innermost axis first. A `CommLedger` does not count them.

    Raises:
        ValueError: not a DTensor, an unknown dim, or a layout whose shards have other sizes than DTensor's chunks.
    """
    if not isinstance(x, DTensor):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"x is a {type(x).__name__}; a DTensor is needed (layout.join takes local tensors)")
    token_dim = _check_tokens(x, layout, _token_dim(x, layout) if dim is None else dim)
    mesh_dims = [mesh_dim for mesh_dim, placement in enumerate(x.placements) if placement == Shard(token_dim)]
    ranks = [x.device_mesh.size(mesh_dim) for mesh_dim in mesh_dims]
    if prod(ranks) == layout.shards:
        expected = nested_sizes(layout.length, ranks)
        check_chunks("shards of the layout", layout.sizes, expected, _axes_name(x.device_mesh, mesh_dims))
    # Partial values are summed first, while tensors are small. Then axes are gathered, innermost first: the reverse of
    # the order in which DTensor cuts.
    x = x.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in x.placements])
    x = _redistribute_by_dim(x, range(x.device_mesh.ndim)[::-1], Replicate())
    in_shard_order = x.to_local(grad_placements=grad_placements)
    return in_shard_order.index_select(token_dim, shard_order(layout).argsort().to(in_shard_order.device))


def _redistribute_by_dim(x: DTensor, mesh_dims: Sequence[int], placement: Placement) -> DTensor:
    """Returns `x` with this placement on `mesh_dims`, redistributed one mesh dim after the other."""
    # In one call torch (2.11 to 2.15, pytorch#194457) would gather over a flattened axis if the mesh has one, such as
    # FSDP2's, and order uneven nested shards wrongly: here in forward, and for sharding in backward.
    for mesh_dim in mesh_dims:
        x = x.redistribute(placements=[placement if i == mesh_dim else old for i, old in enumerate(x.placements)])
    return x


def shard_order(layout: SequenceLayout) -> Tensor:
    """Returns the positions of shard 0, shard 1, ..., concatenated: a LongTensor [N] on the CPU."""
    return torch.cat([layout.positions(shard) for shard in range(layout.shards)])


def nested_sizes(length: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of DTensor's chunks of `length` over axes of so many ranks: one per rank, last axis fastest."""
    sizes = (length,)
    for count in ranks:
        sizes = tuple(shard_size for size in sizes for shard_size in chunk_sizes(size, count))
    return sizes


def _check_tokens(x: Tensor, layout: SequenceLayout, dim: int) -> int:
    """Returns `dim`, counted from the start. Raises ValueError unless `x` has N tokens on it."""
    check_tensor("x", x)
    if not isinstance(layout, SequenceLayout):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"layout is a {type(layout).__name__}; a SequenceLayout is needed")
    if not -x.ndim <= integer("dim", dim) < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    if x.shape[dim] != layout.length:
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; the layout has {layout.length}")
    return dim % x.ndim


@lru_cache(maxsize=16)  # needed for each tensor of each batch, mostly with the same layout
def _resolve_axes(
    layout: SequenceLayout, mesh: DeviceMesh, axes: tuple[str, ...] | None
) -> tuple[tuple[int, ...], SequenceLayout, tuple[int, ...], str]:
    """Returns (mesh dims that shard the sequence, layout over their ranks, sizes of DTensor's chunks, axis names)."""
    mesh_dims = _sequence_dims(mesh, layout, axes)
    expected = nested_sizes(layout.length, [mesh.size(mesh_dim) for mesh_dim in mesh_dims])
    return tuple(mesh_dims), _layout_over(layout, mesh, mesh_dims), expected, _axes_name(mesh, mesh_dims)


def _sequence_dims(mesh: DeviceMesh, layout: SequenceLayout, axes: Sequence[str] | None) -> list[int]:
    """Returns the mesh dims that shard the sequence, outermost first."""
    names = mesh.mesh_dim_names or ()
    if axes is not None:
        if not axes or list(axes) != [name for name in names if name in axes]:
            raise ValueError(f"axes {tuple(axes)} are not some of the mesh's, {tuple(names)}, outermost first")
        return [names.index(name) for name in axes]
    mesh_dims = [mesh_dim for mesh_dim, name in enumerate(names) if name in SEQUENCE_AXES]
    # A mesh with other axes, such as the flattened one of FSDP2, may shard the sequence over all of its axes.
    shards_whole_mesh = layout.shards == mesh.size() != prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
    return mesh_dims if mesh_dims and not shards_whole_mesh else list(range(mesh.ndim))


def _layout_over(layout: SequenceLayout, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> SequenceLayout:
    """Returns the layout over all ranks of these mesh dims: `layout`, or `layout` refined over `ulysses`."""
    ranks, innermost = prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims), mesh_dims[-1]
    if layout.shards == ranks:
        return layout
    # A layout over the axes outside `ulysses` is refined over its ranks, like Ulysses inside a ring.
    head_ranks = mesh.size(innermost) if _axes_name(mesh, [innermost]) == "ulysses" else 1
    if layout.shards * head_ranks == ranks:
        return layout.refine(head_ranks)
    sizes = " x ".join(str(mesh.size(mesh_dim)) for mesh_dim in mesh_dims)
    raise ValueError(f"the layout has {layout.shards} shards; axis {_axes_name(mesh, mesh_dims)} has {sizes} ranks")


def _token_dim(x: DTensor, layout: SequenceLayout) -> int:
    """Returns the dim of the tokens, inferred from length and placements."""
    names = x.device_mesh.mesh_dim_names or [""] * x.device_mesh.ndim
    sharded_dims = {name: p.dim for name, p in zip(names, x.placements, strict=True) if isinstance(p, Shard)}
    by_name = [dim for name, dim in sharded_dims.items() if name in SEQUENCE_AXES]
    # The strongest evidence first: a sequence axis, any axis, the size alone.
    for candidates in (by_name, [p.dim for p in x.placements if isinstance(p, Shard)], range(x.ndim)):
        matching_dims = {dim for dim in candidates if x.shape[dim] == layout.length}
        if len(matching_dims) == 1:
            return matching_dims.pop()
    raise ValueError(f"which dim of {describe(x)} has the {layout.length} tokens of the layout? pass dim=")


def _axes_name(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> str:
    """Names these mesh dims, such as "ring x ulysses"."""
    names = mesh.mesh_dim_names or [f"#{mesh_dim}" for mesh_dim in range(mesh.ndim)]
    return " x ".join(names[mesh_dim] for mesh_dim in mesh_dims)
