"""Calls on DTensors: checks the placements, calls the method on local tensors, and returns DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention.call.attend import attend, attend_projected
from armillary.attention.call.dtensor_checks import check_dtensors, head_placements
from armillary.attention.call.interface import AttentionMethod
from armillary.attention.call.local_parameters import with_local_parameters
from armillary.attention.call.projections import Projections
from armillary.attention.call.spec import AttentionOptions
from armillary.core.parts import dtensor_like, local_of


def attend_dtensors(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> DTensor | tuple[DTensor, DTensor]:
    """Returns attention on DTensors q, k and v, which have equal placements on a mesh with the method's axes.

    Placements: `Shard(1)` on the axes of the method, in the mesh's order. So rank r * U + u of `ring x ulysses` has
    chunk r * U + u of the tokens, which is shard r * U + u of the layout: a DTensor has its tokens in the order of the
    layout's shards. On other axes heads may be `Shard(2)` (tp), if the axis divides H and K, and the batch `Shard(0)`.
    The gradients of q, k and v are placed like them.

    Args:
        sinks: a local tensor [H] or [n, H] of this rank's heads; or a DTensor of all heads, `Shard` of its last dim on
            the axes that shard heads, and `Replicate` on others. The gradient of the DTensor is `Partial` on the axes
            that shard batch or tokens.
        options: if each row has its own documents, the mask has those of this rank's rows. Shards of layouts must have
            the sizes of DTensor's chunks, the first of which have ceil(N / P) tokens.

    Returns:
        out [B, N, H, Dv], placed like q; with `return_lse` also lse [B, N, H], placed like q. Detach lse before it
        leaves a compiled graph, because torch expects a gradient for every DTensor that leaves a graph and could have
        one.

    torch.compile traces this without a break. A graph is for one mesh, placement and shape.

    Raises:
        ValueError: DTensors and local tensors are mixed, or placements, shards or heads do not fit. Raised before any
            communication.
    """
    q, k, v = _all_dtensors(q, k, v, sinks)
    check_dtensors(method, {"q": q, "k": k, "v": v} | _dtensors_of({"sinks": sinks}), options)
    if isinstance(sinks, DTensor):
        sinks = local_of(sinks, _sinks_gradient(sinks, q.placements))
    local_out, lse = attend(method, local_of(q), local_of(k), local_of(v), sinks, options)
    out = dtensor_like(q, local_out, (*q.shape[:3], v.shape[3]))
    return (out, dtensor_like(q, lse, q.shape[:3])) if options.return_lse else out


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
    if not isinstance(x, DTensor):
        raise ValueError("x is local and sinks are a DTensor; pass both as DTensors or both as local tensors")
    parameters = _dtensors_of({f"parameter {i}": parameter for i, parameter in enumerate(projections.parameters())})
    check_dtensors(method, {"x": x} | _dtensors_of({"sinks": sinks}) | parameters, options)
    placements = head_placements(x, parameters.values())
    if isinstance(sinks, DTensor):
        sinks = local_of(sinks, _sinks_gradient(sinks, placements))
    if parameters:
        projections = with_local_parameters(projections, _sharding_axes(x, placements))
    # Ranks with different heads of the same tokens each compute a share of the gradient of x: `Partial`.
    gradient = [Partial() if placement == Shard(2) else placement for placement in placements]
    out = attend_projected(method, local_of(x, gradient), projections, sinks, options)
    head_ranks = [x.device_mesh.size(dim) for dim, placement in enumerate(placements) if placement == Shard(2)]
    shape = (*x.shape[:2], out.shape[2] * prod(head_ranks), out.shape[3])
    return dtensor_like(x, out, shape, dict(enumerate(placements)))


def _dtensors_of(tensors: Mapping[str, Tensor | None]) -> dict[str, DTensor]:
    return {name: x for name, x in tensors.items() if isinstance(x, DTensor)}


def _sharding_axes(x: DTensor, placements: Sequence[Placement]) -> frozenset[str]:
    """Returns the names of the axes of x's mesh whose placement shards a dim."""
    names = x.device_mesh.mesh_dim_names or ()
    return frozenset(name for name, placement in zip(names, placements, strict=True) if isinstance(placement, Shard))


def _all_dtensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[DTensor, DTensor, DTensor]:
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join("DTensor" if isinstance(x, DTensor) else "local" for x in (q, k, v))
        sinks_kind = "; sinks are a DTensor" if isinstance(sinks, DTensor) else ""
        raise ValueError(f"q, k, v are {kinds}{sinks_kind}; pass all three as DTensors or all as local tensors")
    return q, k, v


def _sinks_gradient(sinks: DTensor, placements: Sequence[Placement]) -> list[Placement]:
    """Returns the placements of the gradient of sinks.

    Args:
        placements: placements of a tensor [B, N, H, ...]. On axes that shard batch or tokens the gradient is `Partial`;
            on axes that shard heads it is sharded.
    """
    heads = Shard(sinks.ndim - 1)
    gradients: dict[Placement, Placement] = {Shard(0): Partial(), Shard(1): Partial(), Shard(2): heads}
    return [gradients.get(placement, Replicate()) for placement in placements]
