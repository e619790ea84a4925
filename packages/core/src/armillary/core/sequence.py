"""Sequences as DTensors that are sharded in the order of a layout, and back.

    x = distribute_sequence(ids, layout, mesh["ring", "ulysses"])   # [B, N] on every rank -> Shard(1) over both axes
    logits = gather_sequence(model(x), layout)                      # -> [B, N, V], in sequence order, on every rank

Between the two, the global view of a DTensor is the sequence in shard order: the tokens of shard 0, then of shard 1,
and so on. torch's `full_tensor()` and `redistribute` do not know layouts and keep that order, which is sequence order
only in a contiguous layout. Ops that do not mix tokens are not affected.
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
    """Shards a tensor that is the same on all ranks: returns a DTensor, `Shard(dim)` in the order of `layout`.

    Rank (r, u) of sequence axes of P x U ranks holds `layout.take(x, r * U + u, dim)`. On all other axes of the mesh
    the result is `Replicate`, from which `redistribute` can shard batch or heads without communication. `full_tensor()`
    of the result has the tokens in shard order; `gather_sequence` returns `x`. The forward pass communicates nothing.

    Differentiable: every rank gets the gradient of the full `x`, gathered by torch as in `full_tensor`.

    Args:
        x: local [..., N, ...], N = `layout.length` on `dim`; any dtype.
        layout: a layout over all ranks of the sequence axes. If the innermost one is `ulysses`, it may also be a layout
            over the axes outside it, which is refined over `ulysses`. Its shards must have DTensor's sizes: 10 tokens
            on 4 ranks are 3, 3, 3, 1 in a DTensor, but 3, 3, 2, 2 in zigzag, which is refused.
        mesh: the mesh of the result, usually the model's, such as `mesh["ring", "ulysses", "tp"]`. Leave out axes that
            shard nothing: at the first call of an op on five axes, even of one rank each, torch (2.15) searches all
            placements, which takes seconds to minutes.
        dim: dim of the tokens; counted from the end if negative.
        axes: names of the mesh axes that shard the sequence. By default the mesh's axes in `SEQUENCE_AXES`; or all
            axes, if it has none of these or if only all axes together have as many ranks as the layout has shards.

    Raises:
        ValueError: an unknown dim or axis, another length, another number of shards, or shards that DTensor would
            cut differently, with both sizes. Raised before any communication.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed")
    if isinstance(x, DTensor):
        raise ValueError("x is a DTensor; the full local tensor is needed, as x.full_tensor() returns it")
    dim = _check_tokens(x, layout, dim)
    mesh_dims, rank_layout, expected, axes_name = _shards(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", rank_layout.sizes, expected, axes_name)
    # Every rank has all of x, so reordering and cutting it is local.
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

    For loaders that read only their rank's tokens. No communication; the gradient is this rank's part.

    Args:
        x: [..., T, ...] with the tokens of this rank's shard on `dim`.
        layout, mesh, dim, axes: as in `distribute_sequence`.
        rows: names of mesh axes whose ranks hold different rows [B, ...], equally many each: `Shard(0)` there.

    Raises:
        ValueError: as in `distribute_sequence`; also if the number of tokens is not the size of this rank's shard, or
            `rows` are not axes of the mesh, or shard the sequence.
    """
    check_tensor("x", x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    dim %= x.ndim
    mesh_dims, rank_layout, expected, axes_name = _shards(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", rank_layout.sizes, expected, axes_name)
    shard = 0  # counted with the last mesh dim fastest, as DTensor cuts
    for mesh_dim in mesh_dims:
        shard = shard * mesh.size(mesh_dim) + mesh.get_local_rank(mesh_dim)
    if x.shape[dim] != (tokens := rank_layout.sizes[shard]):
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; shard {shard} has {tokens}")
    names = mesh.mesh_dim_names or ()
    row_dims = [mesh_dim for mesh_dim, name in enumerate(names) if name in rows and mesh_dim not in mesh_dims]
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
    """Returns True if the layout's shards have the sizes of DTensor's, which the functions above require."""
    _, rank_layout, expected, _ = _shards(layout, mesh, None if axes is None else tuple(axes))
    return rank_layout.sizes == expected


def gather_sequence(
    x: DTensor, layout: SequenceLayout, dim: int | None = None, *, grad_placements: Sequence[Placement] | None = None
) -> Tensor:
    """Returns the full tensor in sequence order, on every rank; `x` has its tokens in the order of `layout`.

    The inverse of `distribute_sequence`: `full_tensor()`, with the tokens put back in sequence order. Sums partial
    values and gathers shards on every axis. Differentiable as `full_tensor` is. (torch's `full_tensor` may be wrong for
    uneven shards over several axes whose mesh has also been flattened, pytorch#194457.)

    Args:
        x: a DTensor with any placements, N = `layout.length` on the dim of the tokens.
        layout: the layout of its tokens.
        dim: dim of the tokens. By default the dim of length N that is sharded over `ring` or `ulysses`; else over any
            axis; else the only dim of that length.
        grad_placements: placements of the result's gradient, as in `full_tensor`. By default `Replicate` on every axis:
            every rank has the full gradient. `Partial` if ranks have addends.

    Bytes sent: as torch's `redistribute`, innermost axis first. A `CommLedger` does not count them.

    Raises:
        ValueError: not a DTensor, an unknown dim, or shards that DTensor would have cut differently.
    """
    if not isinstance(x, DTensor):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"x is a {type(x).__name__}; a DTensor is needed (layout.join takes local tensors)")
    token_dim = _check_tokens(x, layout, _token_dim(x, layout) if dim is None else dim)
    mesh_dims = [mesh_dim for mesh_dim, placement in enumerate(x.placements) if placement == Shard(token_dim)]
    ranks = [x.device_mesh.size(mesh_dim) for mesh_dim in mesh_dims]
    if prod(ranks) == layout.shards:
        expected = nested_sizes(layout.length, ranks)
        check_chunks("shards of the layout", layout.sizes, expected, _axes_name(x.device_mesh, mesh_dims))
    # Partial values are summed first, while shards are small; then axes are gathered, innermost first.
    x = x.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in x.placements])
    x = _redistribute_by_dim(x, range(x.device_mesh.ndim)[::-1], Replicate())
    in_shard_order = x.to_local(grad_placements=grad_placements)
    return in_shard_order.index_select(token_dim, shard_order(layout).argsort().to(in_shard_order.device))


def _redistribute_by_dim(x: DTensor, mesh_dims: Sequence[int], placement: Placement) -> DTensor:
    """Returns `x` with this placement on some mesh dims, redistributed one dim after the other.

    Not in one call: torch (2.11 to 2.15, pytorch#194457) would gather over a flattened axis if the mesh has one, such
    as FSDP2's, and then orders uneven nested shards wrongly, in forward and in the backward of sharding.
    """
    for mesh_dim in mesh_dims:
        x = x.redistribute(placements=[placement if i == mesh_dim else old for i, old in enumerate(x.placements)])
    return x


def shard_order(layout: SequenceLayout) -> Tensor:
    """Returns the positions of shard 0, shard 1, ..., concatenated: a LongTensor [N] on the CPU."""
    return torch.cat([layout.positions(shard) for shard in range(layout.shards)])


def nested_sizes(length: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Returns DTensor's shard sizes of `length` over several axes: one per rank, the last axis fastest."""
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


@lru_cache(maxsize=16)
def _shards(
    layout: SequenceLayout, mesh: DeviceMesh, axes: tuple[str, ...] | None
) -> tuple[tuple[int, ...], SequenceLayout, tuple[int, ...], str]:
    """Returns the mesh dims that shard the sequence, the layout over all their ranks, DTensor's sizes, the dims' names.

    Cached: needed for each tensor of each batch, mostly with the same layout.
    """
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
    # A mesh of other axes alone, such as the flattened one of FSDP2, may shard the sequence over all of them.
    spans_mesh = layout.shards == mesh.size() != prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
    return mesh_dims if mesh_dims and not spans_mesh else list(range(mesh.ndim))


def _layout_over(layout: SequenceLayout, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> SequenceLayout:
    """Returns the layout over all ranks of these mesh dims, refined over `ulysses` if need be."""
    ranks, innermost = prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims), mesh_dims[-1]
    if layout.shards == ranks:
        return layout
    # A layout over the axes outside `ulysses` is refined over its ranks, like Ulysses inside a ring.
    heads = mesh.size(innermost) if _axes_name(mesh, [innermost]) == "ulysses" else 1
    if layout.shards * heads == ranks:
        return layout.refine(heads)
    sizes = " x ".join(str(mesh.size(mesh_dim)) for mesh_dim in mesh_dims)
    raise ValueError(f"the layout has {layout.shards} shards; axis {_axes_name(mesh, mesh_dims)} has {sizes} ranks")


def _token_dim(x: DTensor, layout: SequenceLayout) -> int:
    """Returns the dim of the tokens, inferred from length and placements."""
    names = x.device_mesh.mesh_dim_names or [""] * x.device_mesh.ndim
    sharded_dims = {name: p.dim for name, p in zip(names, x.placements, strict=True) if isinstance(p, Shard)}
    by_name = [dim for name, dim in sharded_dims.items() if name in SEQUENCE_AXES]
    for candidates in (by_name, [p.dim for p in x.placements if isinstance(p, Shard)], range(x.ndim)):
        matching_dims = {dim for dim in candidates if x.shape[dim] == layout.length}
        if len(matching_dims) == 1:
            return matching_dims.pop()
    raise ValueError(f"which dim of {describe(x)} has the {layout.length} tokens of the layout? pass dim=")


def _axes_name(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> str:
    """Names these mesh dims, such as "ring x ulysses"."""
    names = mesh.mesh_dim_names or [f"#{mesh_dim}" for mesh_dim in range(mesh.ndim)]
    return " x ".join(names[mesh_dim] for mesh_dim in mesh_dims)
