"""Calls on DTensors: checks the placements, calls the method on local tensors, and returns DTensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from armillary.attention.call.autograd import attend, project
from armillary.attention.call.qkv_sources import Projections
from armillary.attention.call.spec import AttentionMethod, AttentionOptions
from armillary.attention.call.validation import over_all_ranks
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import compat, dtensor, object_of

Metadata = tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]]
"""Mesh, placements and shape of a DTensor: the fields of `Placed`."""


def attend_dtensors(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    expansion: Tensor | None = None,
) -> DTensor | tuple[DTensor, DTensor]:
    """Returns attention on DTensors q, k and v, which have equal placements on a mesh with the method's axes.

    Placements: `Shard(1)` on the axes of the method, in the mesh's order. So rank r * U + u of `ring x ulysses` has
    chunk r * U + u of the tokens, which is shard r * U + u of the layout: a DTensor has its tokens in the order of the
    layout's shards. Without a layout, this is sequence order, as `distribute_tensor` places tokens. On other axes heads
    may be `Shard(2)` (tp), if the axis divides H and K, and the batch `Shard(0)`. The gradients of q, k and v are
    placed like them.

    Args:
        sinks: a local tensor [H] or [n, H] of this rank's heads; or a DTensor of all heads, `Shard` of its last dim on
            the axes that shard heads, and `Replicate` on others. The gradient of the DTensor is `Partial` on the axes
            that shard batch or tokens.
        expansion: a local tensor [K, D - Dr + Dv, L] of this rank's heads; or a DTensor of all heads, `Shard(0)` on the
            axes that shard the heads of q, and `Replicate` on others. Its gradient is as that of sinks. The rotary keys
            k and latents v, which have no heads, are then `Replicate` where heads are sharded, and their gradients
            `Partial` there.
        options: if each row has its own documents, the mask has those of this rank's rows. Shards of layouts must have
            the sizes of DTensor's chunks, the first of which have ceil(N / P) tokens. No check can tell whether the
            tensors are in the order of a layout: `distribute_sequence` places them so, `distribute_tensor` does not.

    Returns:
        out [B, N, H, Dv], placed like q; with `return_lse` also lse [B, N, H], placed like q. Detach lse before it
        leaves a compiled graph, because torch expects a gradient for every DTensor that leaves a graph and could have
        one.

    torch.compile traces this without a break. A graph is for one mesh, placement and shape.

    Raises:
        ValueError: DTensors and local tensors are mixed, or placements, shards or heads do not fit. Raised before any
            communication.
    """
    qkv = dtensor.check_kinds({"q": q, "k": k, "v": v}, {"sinks": sinks, "expansion": expansion})
    options = _with_contiguous_layouts(method, options, qkv["q"], qkv["k"])
    _check_placements(method, qkv | _dtensors_of({"sinks": sinks, "expansion": expansion}), options, expansion)
    placed_q = qkv["q"]
    axes = dtensor.sharding_axes(placed_q)
    sinks, expansion = [dtensor.local_of(x, axes) if isinstance(x, DTensor) else x for x in (sinks, expansion)]
    # Latents have no heads: ranks with other heads have a share of their gradients.
    local_q, local_k, local_v = [dtensor.local_of(x, () if expansion is None else axes) for x in qkv.values()]
    local_out, lse = attend(method, local_q, local_k, local_v, sinks, options, expansion)
    out = dtensor.result_like(placed_q, local_out, (*q.shape[:3], local_out.shape[3]))
    return (out, dtensor.result_like(placed_q, lse, q.shape[:3])) if options.return_lse else out


def project_dtensors(
    method: AttentionMethod, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> DTensor:
    """Returns attention from hidden states x [B, N, E], a DTensor on a mesh with the method's axes.

    x is `Shard(1)` on the axes of the method, like q in `attend_dtensors`, and `Shard(0)` or `Replicate` on others.
    Projections receive the local part of x, and use the local parts of their DTensor parameters. These are on the mesh
    of x or on some of its axes, and `Replicate` on each axis that shards x. A parameter that is sharded on another axis
    (tp) is sharded by heads: `heads` and `key_heads` are then numbers of local heads, and projections must not
    communicate over that axis.

    The gradient of a DTensor is a DTensor on the same mesh: `Partial` on axes on which the DTensor is replicated and
    tokens, batch or heads are sharded, otherwise placed like the DTensor. The gradient of a plain parameter is this
    rank's share.

    Args:
        sinks: as in `attend_dtensors`. Heads are sharded on the axes that shard the projections' parameters.

    Returns:
        out [B, N, H, Dv], placed like x, and `Shard(2)` where heads are sharded.

    Raises:
        ValueError: placements, meshes or shards do not fit, or x is local and sinks are a DTensor. Raised before any
            communication.
    """
    hidden = dtensor.check_kinds({"x": x}, {"sinks": sinks})["x"]
    options = _with_contiguous_layouts(method, options, hidden, hidden)
    parameters = _dtensors_of({f"parameter {i}": parameter for i, parameter in enumerate(projections.parameters())})
    _check_placements(method, {"x": hidden} | _dtensors_of({"sinks": sinks}) | parameters, options)
    heads = _projected_heads(hidden, parameters.values())
    # Ranks with different heads of the same tokens each compute a share of the gradient of x.
    axes = dtensor.sharding_axes(heads)
    if isinstance(sinks, DTensor):
        sinks = dtensor.local_of(sinks, axes)
    if parameters:
        # `of_tokens` must exist exactly if the originals have it; isinstance of a Protocol cannot be traced.
        by_token = hasattr(projections, "of_tokens")
        projections = (LocalTokenProjections if by_token else LocalProjections)(projections, axes)
    out = project(method, dtensor.local_of(hidden, axes), projections, sinks, options)
    head_ranks = [
        heads.device_mesh.size(dim) for dim, placement in enumerate(heads.placements) if placement == Shard(2)
    ]
    shape = (*x.shape[:2], out.shape[2] * prod(head_ranks), out.shape[3])
    return dtensor.result_like(hidden, out, shape, dict(enumerate(heads.placements)))


def _with_contiguous_layouts(
    method: AttentionMethod, options: AttentionOptions, q: DTensor, k: DTensor
) -> AttentionOptions:
    """Returns the options with the layouts that the placements of q and k say, if there is no layout."""
    axes = [axis for axis in method.axes if axis.size > 1]
    if options.layout is not None or not axes or q.ndim < 2 or k.ndim < 2:
        return options
    key_layout = options.key_layout
    if key_layout is None and k.shape[1] != q.shape[1]:
        key_layout = dtensor.contiguous_layout(k, axes)
    return options._replace(layout=dtensor.contiguous_layout(q, axes), key_layout=key_layout)


def _dtensors_of(tensors: Mapping[str, Tensor | None]) -> dict[str, DTensor]:
    return {name: x for name, x in tensors.items() if isinstance(x, DTensor)}


def _projected_heads(x: dtensor.Placed | DTensor, parameters: Iterable[dtensor.Placed | DTensor]) -> dtensor.Placed:
    """Returns x [B, N, ...], with the placements of heads projected from it.

    These are the placements of x, and `Shard(2)` on axes that shard the parameters.
    """
    head_axes = {name for parameter in parameters for name in dtensor.sharding_axes(parameter)}
    placements = tuple(
        Shard(2) if name in head_axes and placement == Replicate() else placement
        for name, placement in zip(dtensor.axis_names(x.device_mesh), x.placements, strict=True)
    )
    return dtensor.Placed(x.device_mesh, placements, tuple(x.shape))


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_placements(
    method: AttentionMethod,
    tensors: Mapping[str, DTensor],
    options: AttentionOptions,
    expansion: Tensor | None = None,
) -> None:
    """Raises ValueError, with the accepted placement, for DTensors that do not fit the method and the layouts.

    While a graph is traced, the checks run outside of it, and specialize the graph to these meshes, placements and
    sizes.

    Args:
        tensors: DTensors by name: "q", "k" and "v"; or "x" and the parameters of projections. Also "sinks", if these
            are a DTensor.
        expansion: None, or that of k and v, which are then rotary keys and latents.
    """
    has_latents = expansion is not None
    # Numbers instead of symbols, which only matters in a graph.
    metadata = {name: (x.device_mesh, x.placements, tuple(map(index, x.shape))) for name, x in tensors.items()}
    if not torch.compiler.is_compiling():
        _check_placed(method, metadata, options.layout, options.key_layout, has_latents)
        return
    # dynamo cannot trace the checks. It calls `_error_in_trace` while it traces, and takes the result as a constant of
    # the graph, so the arguments must be plain values.
    layout, key_layout = (x.text if x is not None else "" for x in (options.layout, options.key_layout))
    error = _error_in_trace(index(method.registered_id), layout, key_layout, metadata, has_latents)
    if error is not None:
        raise ValueError(error)


@compat.constant_when_traced
def _error_in_trace(
    method_id: int, layout: str, key_layout: str, metadata: Mapping[str, Metadata], has_latents: bool
) -> str | None:
    """Returns the message of the error that `_check_placed` raises, or None."""
    query_layout, keys_layout = [SequenceLayout.read(text) if text else None for text in (layout, key_layout)]
    try:
        _check_placed(object_of(method_id), metadata, query_layout, keys_layout, has_latents)
    except ValueError as error:
        return str(error)
    return None


def _check_placed(
    method: AttentionMethod,
    metadata: Mapping[str, Metadata],
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | None,
    has_latents: bool,
) -> None:
    """Does the checks of `_check_placements`, which need only meshes, placements and shapes."""
    tensors = {
        name: dtensor.Placed(compat.traced_object(mesh), placements, shape)
        for name, (mesh, placements, shape) in metadata.items()
    }
    axes = [axis for axis in method.axes if axis.size > 1]
    # `check_call` raises if the method needs a layout and there is none.
    sizes = None if layout is None else over_all_ranks(layout, method).sizes
    key_sizes = sizes if key_layout is None else over_all_ranks(key_layout, method).sizes
    if "x" in tensors:
        name, x = "heads", tensors["x"]
        dtensor.check_tokens("x", x, axes, others=(Shard(0), Replicate()), sizes=sizes)
        parameters = {name: x for name, x in tensors.items() if name not in ("x", "sinks")}
        for parameter_name, parameter in parameters.items():
            _check_parameter(f"{parameter_name} of projections", parameter, x)
        heads = _projected_heads(x, parameters.values())
    else:
        name, heads = "q", tensors["q"]
        dtensor.check_tokens_and_heads("q", heads, axes, sizes)
        if has_latents:  # one for all heads
            for kv_name in "kv":
                dtensor.check_beside(kv_name, tensors[kv_name], name, heads, {0: 0, 1: 1})
        else:
            dtensor.check_alike({name: tensors[name] for name in "qkv"})
        dtensor.check_tokens_and_heads("k", tensors["k"], axes, key_sizes)
    if "expansion" in tensors:
        dtensor.check_beside("expansion", tensors["expansion"], name, heads, {2: 0})
    if "sinks" in tensors:
        sinks = tensors["sinks"]
        dtensor.check_beside("sinks", sinks, name, heads, {2: len(sinks.shape) - 1})


def _check_parameter(name: str, parameter: dtensor.Placed, x: dtensor.Placed) -> None:
    """Raises ValueError unless the mesh of a parameter has only axes of the mesh of x.

    The parameter must be replicated on axes that shard x, and may be sharded evenly on others.
    """
    mesh, names = parameter.device_mesh, dtensor.axis_names(parameter.device_mesh)
    if not set(names) <= set(dtensor.axis_names(x.device_mesh)):
        raise ValueError(
            f"{name} is {dtensor.describe(parameter)} and x is {dtensor.describe(x)}; it must lie on axes of the mesh "
            f"of x, Replicate() where x is sharded, or be a plain tensor"
        )
    for dim, placement in enumerate(parameter.placements):
        x_placement, ranks = x.placements[dtensor.dim_of_axis("x", x, Axis.on(mesh, dim))], mesh.size(dim)
        if isinstance(placement, Shard) and not isinstance(x_placement, Shard):
            if parameter.shape[placement.dim] % ranks:
                raise ValueError(
                    f"{name} is {dtensor.describe(parameter)}; its heads must be sharded evenly over {ranks} ranks"
                )
        elif placement != Replicate() and ranks > 1:
            raise ValueError(
                f"{name} is {placement!r} on axis {names[dim]!r} of {dtensor.describe(parameter)}; it must be "
                "Replicate() there"
            )


# -- projections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalProjections:
    """Projections of local tensors, which use the local part of each DTensor parameter."""

    original: Any
    sharding_axes: frozenset[str]

    @property
    def heads(self) -> int:
        return self.original.heads

    @property
    def key_heads(self) -> int:
        return self.original.key_heads

    def q(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        with LocalPartsMode(self.sharding_axes):
            return self.original.q(x, heads)

    def kv(self, x: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        with LocalPartsMode(self.sharding_axes):
            return self.original.kv(x, heads)

    def parameters(self) -> Iterable[Tensor]:
        return self.original.parameters()

    def cache_key(self) -> Hashable | None:
        cache_key = self.original.cache_key() if hasattr(self.original, "cache_key") else None
        return None if cache_key is None else ("local parts", cache_key)


@dataclass(frozen=True)
class LocalTokenProjections(LocalProjections):
    """`LocalProjections` of `TokenProjections`."""

    def of_tokens(self, tokens: slice) -> Self:
        return replace(self, original=self.original.of_tokens(tokens))


class LocalPartsMode(TorchFunctionMode):
    """Passes the local part of each DTensor argument to torch's functions.

    The gradient of the local part becomes the gradient of the DTensor, `Partial` on those of `sharding_axes` on which
    the DTensor is replicated. This needs no communication. DTensor's own sharding rules are not used, because they do
    not flatten uneven shards or index rows, and cannot be traced.
    """

    def __init__(self, sharding_axes: frozenset[str]) -> None:
        super().__init__()
        self.sharding_axes = sharding_axes

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.unflatten:  # calls `super()`, which dynamo of torch 2.11 does not trace in a mode
            func = torch.unflatten
        return func(*self.local(args), **{name: self.local(value) for name, value in (kwargs or {}).items()})

    def local(self, value: Any) -> Any:
        """Returns an argument with each DTensor in it replaced by its local part."""
        if isinstance(value, DTensor):
            return dtensor.local_of(value, self.sharding_axes)
        if type(value) in (list, tuple):
            return type(value)(self.local(item) for item in value)
        return value
