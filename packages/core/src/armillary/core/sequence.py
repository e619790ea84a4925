"""From a whole sequence to a DTensor that is sharded as a layout says, and back.

    x = distribute_sequence(ids, layout, mesh["ring", "ulysses"])   # [B, N] on every rank -> Shard(1) over both axes
    logits = gather_sequence(model(x), layout)                      # -> [B, N, V], in sequence order, on every rank

Between the two, the global view of a DTensor is the sequence in the order in which ranks hold it: what shard 0 holds,
then what shard 1 holds, and so on. `full_tensor()` and `redistribute` are torch's and know no layout: they give that
order, which is the sequence's own for a contiguous layout only. What does not look across tokens need not care.
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
from armillary.core.placements import check_chunks, chunk_sizes, describe
from armillary.core.validation import check_tensor, integer

SEQUENCE_AXES = ("nodes", "devices", "ring", "ulysses")
"""The axes that shard the sequence in a mesh of `build_mesh`."""


def distribute_sequence(
    x: Tensor, layout: SequenceLayout, mesh: DeviceMesh, dim: int = 1, *, axes: Sequence[str] | None = None
) -> DTensor:
    """The whole tensor, the same on all ranks -> a DTensor over `mesh`, `Shard(dim)` in the order of `layout`.

    Rank (r, u) of sequence axes of P x U ranks holds `layout.take(x, r * U + u, dim)`; on all other axes of the mesh
    the result is `Replicate`, from where `redistribute` cuts (batch or heads) without communication. `full_tensor()` of
    the result is `x` with its tokens in the order of the shards; `gather_sequence` gives `x`. Nothing is sent forward.

    Differentiable: every rank gets the gradient of the whole `x`, gathered by torch, as `full_tensor` would read it.

    Args:
        x: [..., N, ...], local, N = `layout.length` on `dim`; any dtype.
        layout: over all ranks of the sequence axes, or, where the innermost of those is `ulysses`, over those outside
            it, each shard then being cut as `layout.refine` does. Its shards must be as long as those that DTensor
            cuts: zigzag(10, 4) has 3, 3, 2, 2 tokens, DTensor 3, 3, 3, 1.
        mesh: what the result lies on: the mesh of the model that it goes into, such as `mesh["ring", "ulysses", "tp"]`,
            or the sequence axes alone. No axes that nothing is sharded over: of the first op of a kind over five axes,
            even of one rank each, torch (2.15) weighs all placements, for seconds to minutes.
        dim: of the tokens; counted from the end if negative.
        axes: the names of the axes of `mesh` that shard the sequence. Unless given, those of
            `SEQUENCE_AXES` that it has; or all, where it has none, or where only all together have as many ranks as
            there are shards.

    Raises:
        ValueError: no such dim or axes, another length, another number of shards, or shards that DTensor would cut
            otherwise, with both sizes. Raised before any communication.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed")
    if isinstance(x, DTensor):
        raise ValueError("x is a DTensor; the whole tensor is needed, as x.full_tensor() gives it")
    dim = _checked(x, layout, dim)
    places, found, cut, named = _shards(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", found.sizes, cut, named)
    ordered = x.index_select(dim, shard_order(found).to(x.device))
    return _redistributed(DTensor.from_local(ordered, mesh, [Replicate()] * mesh.ndim), places, Shard(dim))


def sequence_from_local(
    x: Tensor,
    layout: SequenceLayout,
    mesh: DeviceMesh,
    dim: int = 1,
    *,
    axes: Sequence[str] | None = None,
    rows: Sequence[str] = (),
) -> DTensor:
    """What a rank has read of the sequence, its shard -> the DTensor that `distribute_sequence` makes of all of it.

    For loaders, of which each rank reads its own tokens. Nothing is sent; the gradient is the local part's.

    Args:
        x: [..., T, ...], T the tokens of this rank's shard, on `dim`.
        layout, mesh, axes: as for `distribute_sequence`.
        rows: names of axes of `mesh` whose ranks have rows [B, ...] of their own, as many each: `Shard(0)` there.

    Raises:
        ValueError: as `distribute_sequence`; x has another number of tokens than this rank's shard; or `rows` are no
            axes of the mesh, or of the sequence.
    """
    check_tensor("x", x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    dim %= x.ndim
    places, found, cut, named = _shards(layout, mesh, None if axes is None else tuple(axes))
    check_chunks("shards of the layout", found.sizes, cut, named)
    shard = 0
    for place in places:
        shard = shard * mesh.size(place) + mesh.get_local_rank(place)
    if x.shape[dim] != (tokens := found.sizes[shard]):
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; shard {shard} has {tokens}")
    names = mesh.mesh_dim_names or ()
    over = [place for place, name in enumerate(names) if name in rows and place not in places]
    if len(over) != len(rows) or (over and dim == 0):
        raise ValueError(
            f"rows={tuple(rows)}, tokens on dim {dim}: rows are dim 0, over axes of {names} other than {named}"
        )
    placements = [Shard(dim) if i in places else Shard(0) if i in over else Replicate() for i in range(mesh.ndim)]
    shape = list(x.shape)
    shape[dim] = layout.length
    shape[0] *= prod(mesh.size(place) for place in over)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def is_cut_by_dtensor(layout: SequenceLayout, mesh: DeviceMesh, axes: Sequence[str] | None = None) -> bool:
    """Whether the layout's shards are those of a DTensor, so that the functions above take it. As these, otherwise."""
    _, found, cut, _ = _shards(layout, mesh, None if axes is None else tuple(axes))
    return found.sizes == cut


def gather_sequence(
    x: DTensor, layout: SequenceLayout, dim: int | None = None, *, grad_placements: Sequence[Placement] | None = None
) -> Tensor:
    """A DTensor whose tokens are in the order of `layout` -> the whole tensor in sequence order, on every rank.

    The inverse of `distribute_sequence`: what `full_tensor()` is to be, which sums what is partial and gathers what is
    sharded on any axis, with the tokens put back in order. Differentiable as that is. (torch's own may be wrong for
    uneven shards over several axes, where their mesh has also been flattened.)

    Args:
        x: a DTensor, N = `layout.length` on the dim of the tokens, however it is placed.
        dim: of the tokens. Unless given, the one of this length that is sharded over `ring` or `ulysses`; or over any
            axis; or the only one.
        grad_placements: what the gradient of the result is, as in `full_tensor`: every rank has all of it (`Replicate`
            on every axis) unless given; `Partial` where ranks have shares to be summed.

    Bytes sent: those of torch's `redistribute`, innermost axis first, which no `CommLedger` counts.

    Raises:
        ValueError: no DTensor, no such dim, or shards that DTensor would have cut otherwise.
    """
    if not isinstance(x, DTensor):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(f"x is a {type(x).__name__}; a DTensor is needed (layout.join takes local tensors)")
    found = _checked(x, layout, _sequence_dim(x, layout) if dim is None else dim)
    places = [place for place, placement in enumerate(x.placements) if placement == Shard(found)]
    ranks = [x.device_mesh.size(place) for place in places]
    if prod(ranks) == layout.shards:
        expected = nested_sizes(layout.length, ranks)
        check_chunks("shards of the layout", layout.sizes, expected, _named(x.device_mesh, places))
    x = x.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in x.placements])
    x = _redistributed(x, range(x.device_mesh.ndim)[::-1], Replicate())
    whole = x.to_local(grad_placements=grad_placements)
    return whole.index_select(found, shard_order(layout).argsort().to(whole.device))


def _redistributed(x: DTensor, places: Sequence[int], placement: Placement) -> DTensor:
    """`x` with this placement on these dims of its mesh, one after the other.

    At once, torch (2.11 to 2.15, pytorch#194457) would gather over a joint axis where the mesh has one, such as that of
    FSDP2, and shards of shards wrongly where they are uneven: forward, and backward of what cuts.
    """
    for place in places:
        x = x.redistribute(placements=[placement if i == place else old for i, old in enumerate(x.placements)])
    return x


def shard_order(layout: SequenceLayout) -> Tensor:
    """The positions of all shards, one shard after the other: a LongTensor [N] on the CPU."""
    return torch.cat([layout.positions(shard) for shard in range(layout.shards)])


def nested_sizes(length: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """How DTensor cuts `length` over axes of so many ranks, one after the other: for each rank, the last fastest."""
    sizes = (length,)
    for count in ranks:
        sizes = tuple(part for size in sizes for part in chunk_sizes(size, count))
    return sizes


def _checked(x: Tensor, layout: SequenceLayout, dim: int) -> int:
    """`dim`, counted from the start."""
    check_tensor("x", x)
    if not isinstance(layout, SequenceLayout):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
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
    """Which dims of the mesh shard the sequence, the layout over all their ranks, DTensor's shards, the dims' names.

    Asked for each tensor of each batch, of layouts that are mostly the same.
    """
    places = _sequence_places(mesh, layout, axes)
    cut = nested_sizes(layout.length, [mesh.size(place) for place in places])
    return tuple(places), _over(layout, mesh, places), cut, _named(mesh, places)


def _sequence_places(mesh: DeviceMesh, layout: SequenceLayout, axes: Sequence[str] | None) -> list[int]:
    """Which dims of the mesh shard the sequence, outermost first."""
    names = mesh.mesh_dim_names or ()
    if axes is not None:
        if not axes or list(axes) != [name for name in names if name in axes]:
            raise ValueError(f"axes {tuple(axes)} are not some of the mesh's, {tuple(names)}, outermost first")
        return [names.index(name) for name in axes]
    places = [place for place, name in enumerate(names) if name in SEQUENCE_AXES]
    together = layout.shards == mesh.size() != prod(mesh.size(place) for place in places)
    return places if places and not together else list(range(mesh.ndim))


def _over(layout: SequenceLayout, mesh: DeviceMesh, places: Sequence[int]) -> SequenceLayout:
    """The layout over all ranks of these dims of the mesh."""
    ranks, innermost = prod(mesh.size(place) for place in places), places[-1]
    if layout.shards == ranks:
        return layout
    heads = mesh.size(innermost) if _named(mesh, [innermost]) == "ulysses" else 1
    if layout.shards * heads == ranks:
        return layout.refine(heads)
    sizes = " x ".join(str(mesh.size(place)) for place in places)
    raise ValueError(f"the layout has {layout.shards} shards; axis {_named(mesh, places)} has {sizes} ranks")


def _sequence_dim(x: DTensor, layout: SequenceLayout) -> int:
    """The dim of the tokens, as far as the placements say."""
    names = x.device_mesh.mesh_dim_names or [""] * x.device_mesh.ndim
    cut = {name: p.dim for name, p in zip(names, x.placements, strict=True) if isinstance(p, Shard)}
    by_name = [dim for name, dim in cut.items() if name in SEQUENCE_AXES]
    for candidates in (by_name, [p.dim for p in x.placements if isinstance(p, Shard)], range(x.ndim)):
        found = {dim for dim in candidates if x.shape[dim] == layout.length}
        if len(found) == 1:
            return found.pop()
    raise ValueError(f"which dim of {describe(x)} has the {layout.length} tokens of the layout? pass dim=")


def _named(mesh: DeviceMesh, places: Sequence[int]) -> str:
    names = mesh.mesh_dim_names or [f"#{place}" for place in range(mesh.ndim)]
    return " x ".join(names[place] for place in places)
