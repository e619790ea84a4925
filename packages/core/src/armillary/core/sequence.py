"""Sequences as DTensors that are sharded by a layout: `distribute_sequence`, `sequence_from_local`, `gather_sequence`.

    axes = mesh["ring", "ulysses"]
    q, k, v = (distribute_sequence(x, layout, axes) for x in (q, k, v))   # [B, N, H, D] -> Shard(1) over both axes
    out = gather_sequence(attend(q, k, v, layout=layout), layout)         # -> [B, N, H, D], in sequence order

The DTensor's global view has the tokens in shard order: those of shard 0, then those of shard 1, and so on. This is
sequence order only in a contiguous layout. torch's `full_tensor()` and `redistribute` do not know layouts and return
tokens in shard order. Ops that do not mix tokens compute the same values in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from armillary.core import compat
from armillary.core.layout import SequenceLayout, shard_order
from armillary.core.placements import check_chunks, chunk_sizes, describe, from_local
from armillary.core.validation import check_dim, check_tensor

SEQUENCE_AXES = ("nodes", "devices", "ring", "ulysses")
"""Names of the axes of `build_mesh` that shard the sequence."""


def distribute_sequence(
    x: Tensor, layout: SequenceLayout, mesh: DeviceMesh, dim: int = 1, *, axes: Sequence[str] | None = None
) -> DTensor:
    """Returns the DTensor of a tensor that all ranks have: `Shard(dim)` on the sequence axes, in the order of `layout`.

    On sequence axes of P x U ranks, rank (r, u) holds shard r * U + u of the layout. On all other axes the result is
    `Replicate`; `redistribute` can shard it by batch or heads there without communication. `gather_sequence` returns
    `x`, `full_tensor()` its tokens in shard order. Forward does not communicate.

    Differentiable: every rank gets the gradient of the full `x`, for which backward gathers the shards' gradients.

    Args:
        x: local [..., N, ...], N = `layout.length` on `dim`; any dtype.
        layout: a layout with one shard for each rank of the sequence axes. If the innermost of these is `ulysses`, a
            layout over the other sequence axes is accepted too, and refined over `ulysses`. Shards must have the sizes
            of DTensor's chunks: 10 tokens on 4 ranks are 3, 3, 3, 1 in a DTensor, but 3, 3, 2, 2 in a zigzag layout,
            which is refused.
        mesh: the mesh of the result, usually the model's, such as `mesh["ring", "ulysses", "tp"]`. Leave out axes that
            shard nothing: the first call of an op on a mesh of five axes, even of one rank each, takes seconds to
            minutes, because torch (2.15) searches all placements.
        dim: dim of the tokens; counted from the end if negative.
        axes: names of the mesh axes that shard the sequence. By default the mesh's axes in `SEQUENCE_AXES`; or all axes
            of the mesh, if it has none of these or the layout has a shard for every rank of the mesh.

    Raises:
        ValueError: `x` has no such dim, the mesh no such axis, or the layout another length, another number of shards,
            or shards of other sizes than DTensor's chunks. Raised before any communication.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed")
    if isinstance(x, DTensor):
        raise ValueError("x is a DTensor; the full local tensor is needed, as x.full_tensor() returns it")
    dim = _check_tokens(x, layout, dim)
    mesh_dims, rank_layout, expected, axes_name = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", rank_layout.sizes, expected, axes_name)
    # Every rank has all of x and cuts it locally. `redistribute` does the cutting, because its backward is the gather.
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

    For loaders that read only the tokens of their rank. Does not communicate: `x` gets the gradient of its own shard.

    Args:
        x: [..., T, ...] with the tokens of this rank's shard on `dim`.
        layout, mesh, dim, axes: as in `distribute_sequence`.
        rows: names of mesh axes that shard the batch: the result is `Shard(0)` on these. All ranks have B rows.

    Raises:
        ValueError: as in `distribute_sequence`; also if T is not the size of this rank's shard, if an axis of `rows` is
            not in the mesh or shards the sequence, or if there are `rows` and the tokens are on dim 0.
    """
    check_tensor("x", x)
    dim = check_dim("x", x, dim)
    mesh_dims, rank_layout, expected, axes_name = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", rank_layout.sizes, expected, axes_name)
    shard = 0  # DTensor cuts dim by dim, so the last mesh dim varies fastest
    for mesh_dim in mesh_dims:
        shard = shard * mesh.size(mesh_dim) + mesh.get_local_rank(mesh_dim)
    if x.shape[dim] != (tokens := rank_layout.sizes[shard]):
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; shard {shard} has {tokens}")
    names = mesh.mesh_dim_names or ()
    row_dims = [mesh_dim for mesh_dim, name in enumerate(names) if name in rows and mesh_dim not in mesh_dims]
    # There are fewer `row_dims` than names if a name is unknown or shards the sequence.
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


def gather_sequence(
    x: DTensor, layout: SequenceLayout, dim: int | None = None, *, grad_placements: Sequence[Placement] | None = None
) -> Tensor:
    """Returns the full tensor in sequence order, on every rank, from a DTensor with tokens in the order of `layout`.

    The inverse of `distribute_sequence`. Like `full_tensor()`, it sums partial values, gathers the shards on every axis
    and is differentiable; then it reorders the tokens. `full_tensor` may be wrong for uneven shards over several axes
    if the mesh has been flattened (pytorch#194457); this function is right there too.

    Args:
        x: a DTensor with any placements, N = `layout.length` on the dim of the tokens.
        layout: the layout of its tokens.
        dim: dim of the tokens. By default the dim of size N that is sharded over a sequence axis; otherwise over any
            axis; otherwise the only dim of size N.
        grad_placements: placements of the result's gradient, as in `full_tensor`. By default `Replicate` on every axis:
            every rank has the full gradient. Use `Partial` if the gradient is the sum of those of all ranks.

    Bytes sent: those of torch's `redistribute`, one axis after another, innermost first. No `CommLedger` counts them.

    Raises:
        ValueError: not a DTensor, a dim that is unknown or has another size than N, or a layout whose shards have other
            sizes than DTensor's chunks.
    """
    if not isinstance(x, DTensor):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"x is a {type(x).__name__}; a DTensor is needed (layout.join takes local tensors)")
    token_dim = _check_tokens(x, layout, _token_dim(x, layout) if dim is None else dim)
    mesh_dims = [mesh_dim for mesh_dim, placement in enumerate(x.placements) if placement == Shard(token_dim)]
    ranks = [x.device_mesh.size(mesh_dim) for mesh_dim in mesh_dims]
    if prod(ranks) == layout.shards:
        expected = nested_sizes(layout.length, ranks)
        check_chunks("shards of the layout", layout.sizes, expected, _axes_name(x.device_mesh, mesh_dims))
    # Partial values are summed first, while shards are small. Then the axes are gathered, innermost first, which is the
    # reverse of the order in which DTensor cuts.
    x = x.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in x.placements])
    x = _redistribute_by_dim(x, range(x.device_mesh.ndim)[::-1], Replicate())
    in_shard_order = compat.to_local(x, grad_placements)
    return in_shard_order.index_select(token_dim, shard_order(layout).argsort().to(in_shard_order.device))


def _redistribute_by_dim(x: DTensor, mesh_dims: Sequence[int], placement: Placement) -> DTensor:
    """Redistributes `x` to `placement` on `mesh_dims`, one mesh dim after the other."""
    # If the mesh has a flattened axis, such as FSDP2's, one call for all dims would gather over that axis and order
    # uneven nested shards wrongly (torch 2.11 to 2.15, pytorch#194457): in forward, or in the backward of sharding.
    for mesh_dim in mesh_dims:
        x = x.redistribute(placements=[placement if i == mesh_dim else old for i, old in enumerate(x.placements)])
    return x


def nested_sizes(length: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Returns the chunk size of each rank if DTensor cuts `length` over axes with these `ranks`; last axis fastest."""
    sizes = (length,)
    for count in ranks:
        sizes = tuple(shard_size for size in sizes for shard_size in chunk_sizes(size, count))
    return sizes


def _check_tokens(x: Tensor, layout: SequenceLayout, dim: int) -> int:
    """Returns `dim`, counted from the start. Raises ValueError unless `x` has the layout's N tokens on it."""
    check_tensor("x", x)
    if not isinstance(layout, SequenceLayout):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"layout is a {type(layout).__name__}; a SequenceLayout is needed")
    dim = check_dim("x", x, dim)
    if x.shape[dim] != layout.length:
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; the layout has {layout.length}")
    return dim


@lru_cache(maxsize=16)  # called for each tensor of each batch, mostly with the same layout
def _resolve_axes(
    layout: SequenceLayout, mesh: DeviceMesh, axes: tuple[str, ...] | None
) -> tuple[tuple[int, ...], SequenceLayout, tuple[int, ...], str]:
    """Returns (mesh dims of the sequence axes, layout over their ranks, DTensor's chunk sizes, the axes' names)."""
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
    # If the layout has a shard for every rank, all axes of the mesh shard the sequence, whatever their names.
    shards_whole_mesh = layout.shards == mesh.size() != prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
    return mesh_dims if mesh_dims and not shards_whole_mesh else list(range(mesh.ndim))


def _layout_over(layout: SequenceLayout, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> SequenceLayout:
    """Returns the layout with one shard for each rank of these mesh dims: `layout`, or `layout` refined."""
    ranks, innermost = prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims), mesh_dims[-1]
    if layout.shards == ranks:
        return layout
    # Ulysses cuts each shard of the axes outside of it once more, over its own ranks.
    head_ranks = mesh.size(innermost) if _axes_name(mesh, [innermost]) == "ulysses" else 1
    if layout.shards * head_ranks == ranks:
        return layout.refine(head_ranks)
    sizes = " x ".join(str(mesh.size(mesh_dim)) for mesh_dim in mesh_dims)
    raise ValueError(f"the layout has {layout.shards} shards; axis {_axes_name(mesh, mesh_dims)} has {sizes} ranks")


def _token_dim(x: DTensor, layout: SequenceLayout) -> int:
    """Returns the dim of `x` that has the layout's tokens, inferred from its size and placement."""
    names = x.device_mesh.mesh_dim_names or [""] * x.device_mesh.ndim
    sharded_dims = {name: p.dim for name, p in zip(names, x.placements, strict=True) if isinstance(p, Shard)}
    by_name = [dim for name, dim in sharded_dims.items() if name in SEQUENCE_AXES]
    # In this order: dims sharded over a sequence axis, dims sharded over any axis, all dims. The first of these groups
    # that has exactly one dim of the layout's length decides.
    for candidates in (by_name, [p.dim for p in x.placements if isinstance(p, Shard)], range(x.ndim)):
        matching_dims = {dim for dim in candidates if x.shape[dim] == layout.length}
        if len(matching_dims) == 1:
            return matching_dims.pop()
    raise ValueError(f"which dim of {describe(x)} has the {layout.length} tokens of the layout? pass dim=")


def _axes_name(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> str:
    """Names these mesh dims, such as "ring x ulysses"."""
    names = mesh.mesh_dim_names or [f"#{mesh_dim}" for mesh_dim in range(mesh.ndim)]
    return " x ".join(names[mesh_dim] for mesh_dim in mesh_dims)
