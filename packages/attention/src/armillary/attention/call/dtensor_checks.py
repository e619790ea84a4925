"""Checks of the placements, heads and shards of DTensors. They raise ValueError before any communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import index

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from armillary.attention.call.graph_key import read_layout
from armillary.attention.call.interface import AttentionMethod
from armillary.attention.call.registered import object_of
from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import over_all_ranks
from armillary.attention.mask import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.parts import Placed, check_chunks, check_placement, chunk_sizes, compat, describe, mesh_dim


def check_dtensors(method: AttentionMethod, tensors: Mapping[str, DTensor], options: AttentionOptions) -> None:
    """Raises ValueError, with the accepted placement, for DTensors that do not fit the method and the layouts.

    While a graph is traced, the checks run outside of it, and specialize the graph to these meshes, placements and
    sizes.

    Args:
        tensors: DTensors by name: "q", "k" and "v"; or "x" and the parameters of projections. Also "sinks", if these
            are a DTensor.
    """
    metadata = {name: Placed(x.device_mesh, x.placements, tuple(x.shape)) for name, x in tensors.items()}
    if not torch.compiler.is_compiling():
        return _check(method, metadata, options)
    # dynamo cannot trace the checks. It calls `_error_in_trace` while it traces, and takes the result as a constant of
    # the graph, so the arguments must be plain values.
    layout, key_layout = (x.text if x is not None else "" for x in (options.layout, options.key_layout))
    meshes, placements = [x.device_mesh for x in metadata.values()], [x.placements for x in metadata.values()]
    shapes = [[index(size) for size in x.shape] for x in metadata.values()]  # numbers instead of symbols
    error = _error_in_trace(index(method.registered_id), layout, key_layout, list(metadata), meshes, placements, shapes)
    if error is not None:
        raise ValueError(error)
    return None


@compat.constant_when_traced
def _error_in_trace(
    method_id: int,
    layout: str,
    key_layout: str,
    names: Sequence[str],
    meshes: Sequence[DeviceMesh],
    placements: Sequence[tuple[Placement, ...]],
    shapes: Sequence[Sequence[int]],
) -> str | None:
    """Returns the message of the error that `_check` raises, or None."""
    metadata = map(Placed, map(compat.traced_object, meshes), placements, map(tuple, shapes))
    options = AttentionOptions(AttentionMask(), read_layout(layout), read_layout(key_layout))
    try:
        _check(object_of(method_id), dict(zip(names, metadata, strict=True)), options)
    except ValueError as error:
        return str(error)
    return None


def _check(method: AttentionMethod, metadata: Mapping[str, Placed], options: AttentionOptions) -> None:
    """Does the checks of `check_dtensors`, which need only meshes, placements and shapes."""
    if "x" in metadata:
        _check_hidden(method, metadata, options.layout)
        return
    q, k, v = (metadata[name] for name in "qkv")
    descriptions = ", ".join(f"{name} {describe(metadata[name])}" for name in "qkv")
    if any(x.device_mesh != q.device_mesh or x.placements != q.placements for x in (k, v)):
        raise ValueError(f"{descriptions}: all three must be placed alike on one mesh")
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise ValueError(f"{descriptions}: each needs 4 dims, [batch, tokens, heads, head dim]")
    _check_sharded_tokens("q", q, method, options.layout, (Shard(0), Shard(2), Replicate()))
    check_heads("q", q)
    check_heads("k", k)
    _check_shards(k, method, options.layout if options.key_layout is None else options.key_layout)
    if "sinks" in metadata:
        _check_sinks(metadata["sinks"], "q", q)


def _check_hidden(method: AttentionMethod, metadata: Mapping[str, Placed], layout: SequenceLayout | None) -> None:
    """Checks x, the parameters of projections, and sinks. The parameters tell which axes shard heads."""
    x = metadata["x"]
    parameters = {name: parameter for name, parameter in metadata.items() if name not in ("x", "sinks")}
    _check_sharded_tokens("x", x, method, layout, (Shard(0), Replicate()))
    for name, parameter in parameters.items():
        _check_parameter(f"{name} of projections", parameter, x)
    if "sinks" in metadata:
        heads = x._replace(placements=head_placements(x, parameters.values()))
        _check_sinks(metadata["sinks"], "heads", heads)


def _check_parameter(name: str, parameter: Placed, x: Placed) -> None:
    """Raises ValueError unless the mesh of a parameter has only axes of the mesh of x.

    The parameter must be replicated on axes that shard x, and may be sharded evenly on others.
    """
    axes = parameter.device_mesh.mesh_dim_names or ("",)
    if not set(axes) <= set(x.device_mesh.mesh_dim_names or ()):
        raise ValueError(
            f"{name} is {describe(parameter)} and x is {describe(x)}; it must lie on axes of the mesh of x, "
            f"Replicate() where x is sharded, or be a plain tensor"
        )
    for dim, axis in enumerate(axes):
        placement, ranks = parameter.placements[dim], parameter.device_mesh.size(dim)
        x_placement = x.placements[mesh_dim(x, Axis.of(parameter.device_mesh[axis]))]
        if isinstance(x_placement, Shard) or not isinstance(placement, Shard):
            check_placement(name, parameter, dim, Replicate())
        elif parameter.shape[placement.dim] % ranks:
            raise ValueError(f"{name} is {describe(parameter)}; its heads must be sharded evenly over {ranks} ranks")


def head_placements(x: Placed | DTensor, parameters: Iterable[Placed | DTensor]) -> tuple[Placement, ...]:
    """Returns the placements of heads projected from x: those of x, and Shard(2) on axes that shard the parameters."""
    head_axes = {
        name
        for parameter in parameters
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        if isinstance(placement, Shard)
    }
    names = x.device_mesh.mesh_dim_names or ()
    return tuple(
        Shard(2) if name in head_axes and placement == Replicate() else placement
        for name, placement in zip(names, x.placements, strict=True)
    )


def _check_sharded_tokens(
    name: str,
    x: Placed,
    method: AttentionMethod,
    layout: SequenceLayout | None,
    other_placements: Sequence[Placement],
) -> None:
    """Raises ValueError unless tokens [B, N, ...] are sharded over the method's axes alone, as the layout cuts them.

    Args:
        other_placements: placements that are accepted on the other axes of the mesh.
    """
    check_token_placements(name, x, _sharding_axes(method), other_placements)
    _check_shards(x, method, layout)


def check_token_placements(
    name: str, x: Placed | DTensor, axes: Sequence[Axis], other_placements: Sequence[Placement]
) -> None:
    """Raises ValueError unless tokens [B, N, ...] are sharded over these axes alone, outermost first."""
    dims = [mesh_dim(x, axis) for axis in axes]
    for dim in dims:
        check_placement(name, x, dim, Shard(1))
    axis_names = [axis.name for axis in axes]
    if dims != sorted(dims):
        raise ValueError(
            f"the mesh of {name} has axes {x.device_mesh.mesh_dim_names}; {axis_names} must come in this order"
        )
    for dim, placement in enumerate(x.placements):
        if dim in dims or x.device_mesh.size(dim) == 1 or placement in other_placements:
            continue
        axis = (x.device_mesh.mesh_dim_names or ())[dim]
        accepted_placements = ", ".join(map(repr, other_placements))
        raise ValueError(
            f"{name} is {placement!r} on axis {axis!r} of {describe(x)}; tokens are sharded over axes {axis_names}, "
            f"and other axes accept {accepted_placements}"
        )


def check_heads(name: str, x: Placed | DTensor) -> None:
    """Raises ValueError unless the heads of x [B, N, H, ...] are sharded evenly."""
    # Then the query heads that share a key/value head are on the rank of that head.
    head_ranks = prod(x.device_mesh.size(i) for i, placement in enumerate(x.placements) if placement == Shard(2))
    if head_ranks > 1 and (len(x.shape) < 3 or x.shape[2] % head_ranks):
        raise ValueError(
            f"{name} is {describe(x)}; its heads are sharded over {head_ranks} ranks, which must divide them"
        )


def _sharding_axes(method: AttentionMethod) -> list[Axis]:
    """Returns the method's axes of more than one rank, outermost first."""
    return [axis for axis in method.axes if axis.size > 1]


def _check_shards(x: Placed, method: AttentionMethod, layout: SequenceLayout | None) -> None:
    """Raises ValueError unless the layout's shards have the sizes of DTensor's chunks."""
    if layout is None:  # `check_call` raises if the method needs one
        return
    # DTensor cuts a dim by one axis after the other, outermost first, each time as torch.chunk does.
    chunks, axes = [x.shape[1]], _sharding_axes(method)
    for axis in axes:
        chunks = [size for chunk in chunks for size in chunk_sizes(chunk, axis.size)]
    shards = over_all_ranks(layout, method).sizes
    check_chunks("the layout's shards", shards, chunks, " x ".join(axis.name for axis in axes))


def _check_sinks(sinks: Placed, name: str, x: Placed) -> None:
    """Raises ValueError unless sinks are sharded by heads exactly on the axes that shard the heads of x."""
    head_dim = Shard(len(sinks.shape) - 1)
    expected_placements: list[Placement] = [
        head_dim if placement == Shard(2) else Replicate() for placement in x.placements
    ]
    if sinks.device_mesh != x.device_mesh or any(
        placement != expected and sinks.device_mesh.size(dim) > 1
        for dim, (placement, expected) in enumerate(zip(sinks.placements, expected_placements, strict=True))
    ):
        raise ValueError(f"sinks are {describe(sinks)}; with {name} {describe(x)} they must be {expected_placements}")
