"""The edge between DTensors and local tensors.

A function that takes DTensors checks their placements, computes on local tensors, and returns DTensors with explicit
placements:

    ((axis_dim,), sizes) = check_tokens("x", x, [axis])             # Shard(1) on the axis; sizes of its shards
    out = function(local_of(x), sizes)                              # the gradient is placed like x
    return result_like(x, out, x.shape, {axis_dim: Replicate()})   # other axes keep their placements

A sequence shard is `Shard(1)`, a head shard `Shard(2)`. Shards have the sizes of DTensor's chunks (`chunk_sizes`). The
global view of a sequence-sharded DTensor has its tokens in shard order: those of shard 0, then those of shard 1, and so
on. This is sequence order only in a contiguous layout. torch's `full_tensor()` and `redistribute` do not know layouts
and return tokens in shard order. Ops that do not mix tokens compute the same values in any order.

    axes = mesh["ring", "ulysses"]
    q, k, v = (distribute_sequence(x, layout, axes) for x in (q, k, v))   # [B, N, H, D] -> Shard(1) over both axes
    out = gather_sequence(attend(q, k, v, layout=layout), layout)         # -> [B, N, H, D], in sequence order
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core import compat
from armillary.core.argument_checks import check_dim, check_tensor, integer
from armillary.core.collectives.collective import (
    check_dims,
    check_heads,
    linear,
    start_all_gather,
    start_head_to_seq,
    start_reduce_scatter,
    start_seq_to_head,
)
from armillary.core.layout import SequenceLayout, check_layout, shard_order
from armillary.core.ledger import phase
from armillary.core.mesh import Axis

SEQUENCE_AXES = ("nodes", "devices", "ring", "ulysses")
"""Names of the axes of `build_mesh` that shard the sequence."""


class Placed(NamedTuple):
    """Mesh, placements and global shape of a DTensor, for checks without the tensor."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


def axis_names(mesh: DeviceMesh) -> Sequence[str]:
    return mesh.mesh_dim_names or [f"#{i}" for i in range(mesh.ndim)]


def describe(x: DTensor | Placed) -> str:
    pairs = zip(axis_names(x.device_mesh), x.placements, strict=True)
    return f"DTensor {list(x.shape)} over ({', '.join(f'{name} {placement!r}' for name, placement in pairs)})"


def chunk_sizes(length: int, *ranks: int) -> tuple[int, ...]:
    """Returns DTensor's shard sizes if axes of so many ranks cut `length` one after the other, the last one fastest."""
    # Each cut is that of torch.chunk: shards of ceil(length / ranks), then the remainder. The last shards may be empty:
    # 9 over 4 ranks is 3, 3, 3, 0.
    sizes = (length,)
    for count in ranks:
        chunks = [(size, -(-size // count)) for size in sizes]
        sizes = tuple(max(0, min(chunk, size - i * chunk)) for size, chunk in chunks for i in range(count))
    return sizes


def contiguous_layout(x: DTensor | Placed, axes: Sequence[Axis], dim: int = 1) -> SequenceLayout:
    """Returns the layout that the placements of `x` say: the axes cut its tokens in sequence order, outermost first.

    Raises:
        ValueError: fewer chunks than ranks.
    """
    sizes = chunk_sizes(int(x.shape[dim]), *[axis.size for axis in axes])
    return SequenceLayout([[range(start, stop)] for start, stop in pairwise(accumulate(sizes, initial=0))])


def local_length(x: DTensor | Placed, dim: int, mesh_dims: Iterable[int]) -> int:
    length = x.shape[dim]
    for mesh_dim in mesh_dims:
        if x.placements[mesh_dim] == Shard(dim):
            length = chunk_sizes(length, x.device_mesh.size(mesh_dim))[x.device_mesh.get_local_rank(mesh_dim)]
    return length


def sharding_axes(x: DTensor | Placed) -> frozenset[str]:
    names = axis_names(x.device_mesh)
    return frozenset(name for name, p in zip(names, x.placements, strict=True) if isinstance(p, Shard))


# -- checks of arguments ----------------------------------------------------------------------------------------------


def check_chunks(name: str, sizes: Sequence[int], expected: Sequence[int], axis: str) -> None:
    if tuple(sizes) != tuple(expected):
        raise ValueError(
            f"{name} {tuple(sizes)} over axis {axis!r} are not the shards of a DTensor, which cuts {sum(expected)} as "
            f"{tuple(expected)} (torch.chunk); choose a size that divides, or pass local tensors"
        )


def dim_of_axis(name: str, x: DTensor | Placed, axis: Axis) -> int:
    """Returns the dim of the mesh of `x` that is the axis. Raises ValueError if there is none over the same ranks."""
    names = axis_names(x.device_mesh)
    if axis.name not in names:
        raise ValueError(f"the mesh of {name} has axes {tuple(names)}; axis {axis.name!r} is not one of them")
    dim = names.index(axis.name)
    if Axis.on(x.device_mesh, dim).ranks() != axis.ranks():
        raise ValueError(f"axis {axis.name!r} of the mesh of {name} is over other ranks than {axis.ranks()}")
    return dim


def check_tokens(
    name: str,
    x: DTensor | Placed,
    axes: Sequence[Axis],
    dim: int = 1,
    *,
    placement: Placement | None = None,
    others: Sequence[Placement] | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[list[int], tuple[int, ...]]:
    """Raises ValueError unless `x` is placed as a call on these axes needs it. Axes of one rank may have any placement.

    Args:
        axes: axes of the call, outermost first.
        placement: the placement that `x` must have on the axes; by default `Shard(dim)`.
        others: placements that are accepted on the other axes of the mesh. By default `Replicate`, and `Shard` of any
            dim, but of `dim` only outside the axes.
        sizes: shard sizes of the caller on all ranks of the axes, which must be those of DTensor's chunks.

    Returns:
        (the mesh dims of the axes, DTensor's shard sizes of the tokens on all ranks of the axes).
    """
    mesh, names, axes_name = x.device_mesh, axis_names(x.device_mesh), " x ".join(axis.name for axis in axes)
    if not 0 <= integer("dim", dim) < len(x.shape):
        raise ValueError(f"{name} {tuple(x.shape)} has no dim {dim}; its dims are 0..{len(x.shape) - 1}")
    mesh_dims = [dim_of_axis(name, x, axis) for axis in axes]
    if mesh_dims != sorted(mesh_dims):
        raise ValueError(f"the mesh of {name} has axes {tuple(names)}; {axes_name} must come in this order")
    for mesh_dim, actual in enumerate(x.placements):
        if mesh_dim in mesh_dims:
            accepted = [Shard(dim) if placement is None else placement]
        elif others is not None:
            accepted = others
        else:
            # With tokens sharded on an axis inside, shards of neighbouring ranks would not be adjacent in the tensor.
            inside = mesh_dim > mesh_dims[0]
            accepted = [Replicate(), *(Shard(other) for other in range(len(x.shape)) if other != dim or not inside)]
        # Types are compared too, because a shard with a stride may equal one without.
        fits = any(type(actual) is type(each) and actual == each for each in accepted)
        if not fits and mesh.size(mesh_dim) > 1:
            raise ValueError(
                f"{name} is {actual!r} on axis {names[mesh_dim]!r} of {describe(x)}; in this call over axis "
                f"{axes_name!r} it must be {' or '.join(map(repr, accepted))} there"
            )
    length = local_length(x, dim, range(min(mesh_dims, default=0)))
    chunks = chunk_sizes(length, *[axis.size for axis in axes])
    check_chunks("shard sizes", chunks if sizes is None else sizes, chunks, axes_name)
    return mesh_dims, chunks


def check_tokens_and_heads(name: str, x: DTensor | Placed, axes: Sequence[Axis], sizes: Sequence[int] | None) -> None:
    """Raises ValueError unless x [B, N, H, ...] is sharded over these axes by tokens alone, and its heads evenly."""
    check_tokens(name, x, axes, others=(Shard(0), Shard(2), Replicate()), sizes=sizes)
    # Then the query heads that share a key/value head are on the rank of that head.
    head_ranks = prod(x.device_mesh.size(i) for i, placement in enumerate(x.placements) if placement == Shard(2))
    if head_ranks > 1 and (len(x.shape) < 3 or x.shape[2] % head_ranks):
        raise ValueError(
            f"{name} is {describe(x)}; its heads are sharded over {head_ranks} ranks, which must divide them"
        )


def check_kinds(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor | None] | None = None) -> dict[str, DTensor]:
    """Returns `tensors`. Raises ValueError, which names `beside` too, unless all are DTensors."""
    dtensors = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
    if len(dtensors) < len(tensors):
        kinds = ", ".join(
            f"{name} {'DTensor' if isinstance(x, DTensor) else 'local'}"
            for name, x in {**tensors, **(beside or {})}.items()
            if x is not None
        )
        raise ValueError(f"{kinds}: pass {', '.join(tensors)} as DTensors, or the local part of each, x.to_local()")
    return dtensors


def check_alike(tensors: Mapping[str, DTensor | Placed]) -> None:
    first = next(iter(tensors.values()))
    if any(x.device_mesh != first.device_mesh or x.placements != first.placements for x in tensors.values()):
        descriptions = ", ".join(f"{name} {describe(x)}" for name, x in tensors.items())
        raise ValueError(f"{descriptions}: all must be placed alike on one mesh")


def placements_beside(tokens: DTensor | Placed, dims: Mapping[int, int]) -> list[Placement]:
    """Returns the placements of a tensor that shares some dims with `tokens`: {dim of tokens: its dim}."""
    return [Shard(dims[p.dim]) if isinstance(p, Shard) and p.dim in dims else Replicate() for p in tokens.placements]


def check_beside(
    name: str, x: DTensor | Placed, tokens_name: str, tokens: DTensor | Placed, dims: Mapping[int, int]
) -> None:
    expected = placements_beside(tokens, dims)
    if x.device_mesh != tokens.device_mesh or any(
        actual != placement and x.device_mesh.size(mesh_dim) > 1
        for mesh_dim, (actual, placement) in enumerate(zip(x.placements, expected, strict=True))
    ):
        raise ValueError(f"{name} is {describe(x)}; with {tokens_name} {describe(tokens)} it must be {expected}")


# -- local tensors and results ----------------------------------------------------------------------------------------


def local_of(x: DTensor, shares: Collection[str] = ()) -> Tensor:
    """Returns this rank's shard of `x`. Its gradient is placed like `x`, with `Replicate` for `Partial` as in torch.

    Args:
        shares: names of axes whose ranks use `x` for different tokens, rows or heads. If `x` is replicated there, each
            rank has a share of its gradient, which is `Partial`.
    """
    names = axis_names(x.device_mesh)
    gradient: list[Placement] = [
        Partial()
        if name in shares and placement == Replicate()
        else Replicate()
        if placement.is_partial()
        else placement
        for name, placement in zip(names, x.placements, strict=True)
    ]
    return compat.to_local(x, gradient)


def result_like(
    x: DTensor, local: Tensor, shape: Sequence[int], changed: Mapping[int, Placement] | None = None
) -> DTensor:
    """Returns the DTensor of global `shape` whose shard on this rank is `local`, on the mesh of `x`.

    Args:
        changed: by mesh dim, the placements that differ from those of `x`. The gradient is placed like the result.
    """
    placements = [(changed or {}).get(mesh_dim, old) for mesh_dim, old in enumerate(x.placements)]
    return from_local(local, x.device_mesh, placements, shape)


def from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    # Without shape and stride, DTensor.from_local assumes that the shards of all ranks have the size of this one.
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


# -- collectives ------------------------------------------------------------------------------------------------------


def all_to_all(
    x: DTensor, axis: Axis, dims: tuple[int, int], sizes: Sequence[int] | None, heads: Sequence[range] | None
) -> DTensor:
    """Redistributes [B, T, H, D] on the axis from `Shard(dims[0])` to `Shard(dims[1])`: (1, 2), or back."""
    check_dims(x)
    (axis_dim,), tokens = check_tokens("x", x, [axis], placement=Shard(dims[0]), sizes=sizes)
    # In the local tensor, axes inside this one have cut the heads already. This axis cuts the local heads.
    outer_heads, mesh = local_length(x, 2, range(axis_dim)), x.device_mesh
    inner_ranks = prod(mesh.size(i) for i in range(axis_dim + 1, mesh.ndim) if x.placements[i] == Shard(2))
    if inner_ranks > 1 and outer_heads % (inner_ranks * axis.size):
        raise ValueError(
            f"{outer_heads} heads of {describe(x)} cannot be cut evenly over {axis.size} ranks of axis {axis.name!r} "
            f"and {inner_ranks} inside it; give a number of heads that {axis.size * inner_ranks} divides, or pass "
            "local tensors"
        )
    counts = chunk_sizes(outer_heads // inner_ranks, axis.size)
    ranges = tuple(starmap(range, pairwise(accumulate(counts, initial=0))))
    if heads is not None:
        check_heads(heads, axis, ranges[-1].stop)
        check_chunks("heads", list(map(len, heads)), counts, axis.name)
    starts = (start_seq_to_head, start_head_to_seq) if dims == (1, 2) else (start_head_to_seq, start_seq_to_head)
    return result_like(x, linear(local_of(x), *starts, axis, tokens, ranges), x.shape, {axis_dim: Shard(dims[1])})


def all_gather(x: DTensor, axis: Axis, sizes: Sequence[int] | None, dim: int) -> Tensor:
    (axis_dim,), chunks = check_tokens("x", x, [axis], dim, sizes=sizes)
    return cast(Tensor, _AllGather.apply(x, axis, chunks, dim, axis_dim))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, axis: Axis, sizes: tuple[int, ...], dim: int, axis_dim: int) -> DTensor:
        ctx.call, ctx.placements = (axis, sizes, dim, axis_dim), x.placements
        local = start_all_gather(x.to_local(), axis, sizes, dim).wait()
        return result_like(x, local, x.shape, {axis_dim: Replicate()})

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (axis, sizes, dim, axis_dim) = grads, ctx.call
        # torch redistributes the gradient on the other axes. We sum it over this axis if it is `Partial` there, so that
        # the ledger counts that; a replicated one needs no sends.
        target = list(ctx.placements)
        if grad.placements[axis_dim] == Partial():
            target[axis_dim] = Partial()
        local = grad.redistribute(placements=target).to_local()
        if target[axis_dim] == Partial():
            with phase("backward"):
                local = start_reduce_scatter(local, axis, sizes, dim).wait()
        return result_like(grad, local, grad.shape, dict(enumerate(ctx.placements))), None, None, None, None


def reduce_scatter(x: DTensor, axis: Axis, sizes: Sequence[int] | None, dim: int) -> DTensor:
    (axis_dim,), chunks = check_tokens("x", x, [axis], dim, placement=Partial(), sizes=sizes)
    local = linear(local_of(x), start_reduce_scatter, start_all_gather, axis, chunks, dim)
    return result_like(x, local, x.shape, {axis_dim: Shard(dim)})


# -- whole sequences --------------------------------------------------------------------------------------------------


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
            of DTensor's chunks: 3, 3, 3, 1 of 10 tokens; the 3, 3, 2, 2 of a zigzag layout are refused.
        mesh: the mesh of the result, usually the model's, such as `mesh["ring", "ulysses", "tp"]`. Leave out axes that
            shard nothing: the first call of an op on a mesh of five axes takes seconds to minutes in torch 2.15.
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
    dim = _check_length(x, layout, dim)
    mesh_dims, rank_layout = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
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
    mesh_dims, _ = _resolve_axes(layout, mesh, None if axes is None else tuple(axes))
    row_dims = [i for i, name in enumerate(axis_names(mesh)) if name in rows and i not in mesh_dims]
    # There are fewer `row_dims` than names if a name is unknown or shards the sequence.
    if len(row_dims) != len(rows) or (row_dims and dim == 0):
        raise ValueError(
            f"rows={tuple(rows)}, tokens on dim {dim}: rows are dim 0, over axes of {tuple(axis_names(mesh))} other "
            f"than {_join_names(mesh, mesh_dims)}"
        )
    placements = [
        Shard(dim) if i in mesh_dims else Shard(0) if i in row_dims else Replicate() for i in range(mesh.ndim)
    ]
    shape = list(x.shape)
    shape[dim] = layout.length
    shape[0] *= prod(mesh.size(mesh_dim) for mesh_dim in row_dims)
    tokens = local_length(Placed(mesh, tuple(placements), tuple(shape)), dim, mesh_dims)
    if x.shape[dim] != tokens:
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; this rank's shard has {tokens}")
    return from_local(x, mesh, placements, shape)


def gather_sequence(
    x: DTensor, layout: SequenceLayout, dim: int | None = None, *, grad_placements: Sequence[Placement] | None = None
) -> Tensor:
    """Returns the full tensor in sequence order, on every rank, from a DTensor with tokens in the order of `layout`.

    The inverse of `distribute_sequence`, differentiable. Like `full_tensor()`, it sums partial values and gathers the
    shards on every axis.

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
    token_dim = _check_length(x, layout, _token_dim(x, layout) if dim is None else dim)
    mesh_dims = [mesh_dim for mesh_dim, placement in enumerate(x.placements) if placement == Shard(token_dim)]
    ranks = [x.device_mesh.size(mesh_dim) for mesh_dim in mesh_dims]
    if prod(ranks) == layout.shards:
        chunks = chunk_sizes(layout.length, *ranks)
        check_chunks("shard sizes of the layout", layout.sizes, chunks, _join_names(x.device_mesh, mesh_dims))
    # Partial values are summed first, while shards are small. Then the axes are gathered, innermost first, which is the
    # reverse of the order in which DTensor cuts.
    x = x.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in x.placements])
    x = _redistribute_by_dim(x, range(x.device_mesh.ndim)[::-1], Replicate())
    in_shard_order = compat.to_local(x, grad_placements)
    return in_shard_order.index_select(token_dim, shard_order(layout).argsort().to(in_shard_order.device))


def _redistribute_by_dim(x: DTensor, mesh_dims: Sequence[int], placement: Placement) -> DTensor:
    # If the mesh has a flattened axis, such as FSDP2's, one call for all dims would gather over that axis and order
    # uneven nested shards wrongly (torch 2.11 to 2.15, pytorch#194457): in forward, or in the backward of sharding.
    for mesh_dim in mesh_dims:
        x = x.redistribute(placements=[placement if i == mesh_dim else old for i, old in enumerate(x.placements)])
    return x


def _check_length(x: Tensor, layout: SequenceLayout, dim: int) -> int:
    """Returns `dim`, counted from the start. Raises ValueError unless `x` has the layout's N tokens on it."""
    check_tensor("x", x)
    check_layout(layout)
    dim = check_dim("x", x, dim)
    if x.shape[dim] != layout.length:
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} tokens; the layout has {layout.length}")
    return dim


@lru_cache(maxsize=16)  # called for each tensor of each batch, mostly with the same layout
def _resolve_axes(
    layout: SequenceLayout, mesh: DeviceMesh, axes: tuple[str, ...] | None
) -> tuple[tuple[int, ...], SequenceLayout]:
    """Returns (mesh dims that shard the sequence, outermost first, layout over their ranks)."""
    names = axis_names(mesh)
    if axes is not None:
        if not axes or list(axes) != [name for name in names if name in axes]:
            raise ValueError(f"axes {axes} are not some of the mesh's, {tuple(names)}, outermost first")
        mesh_dims = [names.index(name) for name in axes]
    else:
        mesh_dims = [mesh_dim for mesh_dim, name in enumerate(names) if name in SEQUENCE_AXES]
        # If the layout has a shard for every rank, all axes of the mesh shard the sequence, whatever their names.
        shards_whole_mesh = layout.shards == mesh.size() != prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
        if not mesh_dims or shards_whole_mesh:
            mesh_dims = list(range(mesh.ndim))
    ranks, axes_name = [mesh.size(mesh_dim) for mesh_dim in mesh_dims], _join_names(mesh, mesh_dims)
    if layout.shards != prod(ranks):
        # Ulysses cuts each shard of the axes outside of it once more, over its own ranks.
        head_ranks = ranks[-1] if names[mesh_dims[-1]] == "ulysses" else 1
        if layout.shards * head_ranks != prod(ranks):
            sizes = " x ".join(map(str, ranks))
            raise ValueError(f"the layout has {layout.shards} shards; axis {axes_name} has {sizes} ranks")
        layout = layout.refine(head_ranks)
    check_chunks("shard sizes of the layout", layout.sizes, chunk_sizes(layout.length, *ranks), axes_name)
    return tuple(mesh_dims), layout


def _token_dim(x: DTensor, layout: SequenceLayout) -> int:
    sharded = [
        (name, p.dim) for name, p in zip(axis_names(x.device_mesh), x.placements, strict=True) if isinstance(p, Shard)
    ]
    by_name = [dim for name, dim in sharded if name in SEQUENCE_AXES]
    # In this order: dims sharded over a sequence axis, dims sharded over any axis, all dims. The first of these groups
    # that has exactly one dim of the layout's length decides.
    for candidates in (by_name, [dim for _, dim in sharded], range(x.ndim)):
        matching_dims = {dim for dim in candidates if x.shape[dim] == layout.length}
        if len(matching_dims) == 1:
            return matching_dims.pop()
    raise ValueError(f"which dim of {describe(x)} has the {layout.length} tokens of the layout? pass dim=")


def _join_names(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> str:
    return " x ".join(axis_names(mesh)[mesh_dim] for mesh_dim in mesh_dims)
