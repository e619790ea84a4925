"""Calls on DTensors: placements are checked, local tensors computed, and DTensors returned."""

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
from armillary.core.placements import dtensor_like, local_of


def attend_dtensors(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> DTensor | tuple[DTensor, DTensor]:
    """Attention on DTensors q, k, v over a mesh that has the method's axes, all three placed alike.

    Placements: `Shard(1)` on the axes of the method, in the mesh's order, so that rank r * U + u of `ring x ulysses`
    has chunk r * U + u, which is shard r * U + u of the layout. On other axes heads may be `Shard(2)` (tp), if the axis
    divides H and K, and the batch `Shard(0)`. Global views hold tokens in the order of the layout's shards. Gradients
    are placed like the tensors they are gradients of.

    Args:
        sinks: local, [H] or [n, H] of this rank's heads; or a DTensor of all heads, sharded along its last dim where
            heads are sharded and `Replicate` elsewhere. The gradient of a DTensor is `Partial` wherever batch or tokens
            are sharded.
        options: the mask is of this rank's rows of the batch, where rows have documents of their own. The shards of
            layouts must be as long as DTensor's own chunks, ceil(N / P) first.

    Returns:
        out [B, N, H, Dv], placed like q; with `return_lse` also lse [B, N, H], placed like q. Detach an lse that leaves
        a compiled graph: torch expects a gradient for every DTensor that leaves a graph and could have one.

    Traced by torch.compile without a break; a graph is for one mesh, placement and shape.

    Raises:
        ValueError: DTensors mixed with local tensors, or placements, shards or heads that do not fit. Raised before any
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
    """Attention from hidden states x [B, N, E], a DTensor on a mesh that has the method's axes.

    x is `Shard(1)` on the axes of the method, like q in `attend_dtensors`, and `Shard(0)` or `Replicate` on others.
    Projections receive the local part of x, and of their parameters that are DTensors: on the mesh of x or on some of
    its axes, `Replicate` wherever x is sharded. A parameter that is sharded on another axis (tp) is sharded by heads:
    `heads` and `key_heads` are then this rank's, and projections communicate nothing over that axis themselves.

    The gradient of a DTensor is one on its mesh: `Partial` on axes where the DTensor is replicated and tokens, batch or
    heads are sharded, elsewhere placed like the DTensor. The gradient of a plain parameter is this rank's share.

    Args:
        sinks: as in `attend_dtensors`, sharded over heads where the projections' parameters are.

    Returns:
        out [B, N, H, Dv], placed like x, and `Shard(2)` where heads are sharded.

    Raises:
        ValueError: placements, meshes or shards that do not fit. Raised before any communication.
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
    # Ranks with different heads of the same tokens each compute a share of the gradient of x.
    gradient = [Partial() if placement == Shard(2) else placement for placement in placements]
    out = attend_projected(method, local_of(x, gradient), projections, sinks, options)
    head_ranks = [x.device_mesh.size(dim) for dim, placement in enumerate(placements) if placement == Shard(2)]
    shape = (*x.shape[:2], out.shape[2] * prod(head_ranks), out.shape[3])
    return dtensor_like(x, out, shape, dict(enumerate(placements)))


def _dtensors_of(tensors: Mapping[str, Tensor | None]) -> dict[str, DTensor]:
    return {name: x for name, x in tensors.items() if isinstance(x, DTensor)}


def _sharding_axes(x: DTensor, placements: Sequence[Placement]) -> frozenset[str]:
    """Returns the names of the axes of x's mesh that shard any dim."""
    names = x.device_mesh.mesh_dim_names or ()
    return frozenset(name for name, placement in zip(names, placements, strict=True) if isinstance(placement, Shard))


def _all_dtensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[DTensor, DTensor, DTensor]:
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join("DTensor" if isinstance(x, DTensor) else "local" for x in (q, k, v))
        sinks_kind = "; sinks are a DTensor" if isinstance(sinks, DTensor) else ""
        raise ValueError(f"q, k, v are {kinds}{sinks_kind}; pass all three as DTensors or all as local tensors")
    return q, k, v


def _sinks_gradient(sinks: DTensor, placements: Sequence[Placement]) -> list[Placement]:
    """Returns the placements of dsinks: `Partial` over batch and tokens, sharded as heads are."""
    heads = Shard(sinks.ndim - 1)
    gradients: dict[Placement, Placement] = {Shard(0): Partial(), Shard(1): Partial(), Shard(2): heads}
    return [gradients.get(placement, Replicate()) for placement in placements]
