"""Attention on DTensors: placements are checked, the method attends on local tensors, and DTensors come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention.local_parameters import with_local_parameters
from armillary.attention.parallel_checks import TakesLocal, check_call, placed_heads
from armillary.attention.projections import Projections
from armillary.attention.spec import AttentionOptions
from armillary.core.placements import dtensor_like, local_of


def attend_dtensors(
    method: TakesLocal, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> DTensor | tuple[DTensor, DTensor]:
    """`method(q, k, v, ...)` on DTensors over a mesh with the method's axes, all three placed alike.

    Placements are `Shard(1)` on the axes of the method, outer ones before inner ones in the mesh; so rank r * U + u of
    `ring x ulysses` has chunk r * U + u, as it has shard r * U + u of the layout. Heads may be `Shard(2)` on others
    (tp) that divide H and K, and stay there; the batch may be `Shard(0)`. Global views hold tokens in the order of the
    layout's shards. Gradients come back placed as what they are gradients of.

    Args:
        sinks: [H] or [S, H] of this rank's heads, local; or a DTensor of all heads, sharded along its last dim where
            heads are and else `Replicate`. The gradient of a DTensor is `Partial` wherever batch or tokens are sharded.
        options: the mask is of this rank's rows of the batch, where rows have documents of their own. The shards of
            layouts must be as long as DTensor's own chunks, ceil(N / P) first.

    Returns:
        out [B, N, H, Dv], placed as q; with `return_lse` also lse [B, N, H], likewise. Where it leaves a compiled
        graph, detach it there: torch wants a gradient for every DTensor that comes out and could have one.

    Inside `torch.compile` too, without a break; a graph is for one mesh, placement and shape.

    Raises:
        ValueError: DTensors with others, or placements, shards or heads that do not fit. Raised before any
            communication.
    """
    q, k, v = _all_dtensors(q, k, v, sinks)
    check_call(method, {"q": q, "k": k, "v": v} | _distributed({"sinks": sinks}), options)
    if isinstance(sinks, DTensor):
        sinks = local_of(sinks, _sinks_gradient(sinks, q.placements))
    local = local_of(q), local_of(k), local_of(v)
    found = cast(Any, method)(*local, sinks=sinks, **options._asdict())
    out, lse = found if options.return_lse else (found, None)
    out = dtensor_like(q, out, (*q.shape[:3], v.shape[3]))
    return out if lse is None else (out, dtensor_like(q, lse, q.shape[:3]))


def project_dtensors(
    method: TakesLocal, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> DTensor:
    """`method.projected(x, projections, ...)` of hidden states x [B, N, E] on a mesh with the method's axes.

    x is `Shard(1)` on the axes of the method, as q is in `attend_dtensors`, and on others `Shard(0)` or `Replicate`.
    Projections are given this rank's part of x, and of their parameters that are DTensors: on the mesh of x or on some
    of its axes, `Replicate` wherever x is sharded. Where a parameter is sharded on another axis (tp) it is by heads:
    `heads` and `key_heads` are then this rank's, and projections send nothing over that axis themselves.

    The gradient of a DTensor is one on its mesh: `Partial` on axes where it is copied and tokens, batch or heads are
    sharded, and else placed as it is. That of a plain parameter is this rank's share.

    Args:
        sinks: as in `attend_dtensors`, with heads sharded where those of projections are.

    Returns:
        out [B, N, H, Dv], placed as x, and `Shard(2)` where heads are sharded.

    Inside `torch.compile` too, as `projected` is.

    Raises:
        ValueError: placements, meshes or shards that do not fit. Raised before any communication.
    """
    if not isinstance(x, DTensor):
        raise ValueError("x is local and sinks are a DTensor; pass both as DTensors or both as local tensors")
    parameters = _distributed({f"parameter {i}": each for i, each in enumerate(projections.parameters())})
    check_call(method, {"x": x} | _distributed({"sinks": sinks}) | parameters, options)
    placements = placed_heads(x, parameters.values())
    if isinstance(sinks, DTensor):
        sinks = local_of(sinks, _sinks_gradient(sinks, placements))
    if parameters:
        projections = with_local_parameters(projections, _sharding(x, placements))
    shares = [Partial() if found == Shard(2) else found for found in placements]
    asked = {"mask": options.mask, "layout": options.layout, "kernel": options.kernel}
    out = cast(Any, method).projected(
        local_of(x, shares), projections, sinks=sinks, scale=options.scale, softcap=options.softcap, **asked
    )
    ranks = [x.device_mesh.size(place) for place, found in enumerate(placements) if found == Shard(2)]
    shape = (*x.shape[:2], out.shape[2] * prod(ranks), out.shape[3])
    return dtensor_like(x, out, shape, dict(enumerate(placements)))


def _distributed(tensors: Mapping[str, Tensor | None]) -> dict[str, DTensor]:
    """Those that are DTensors."""
    return {name: x for name, x in tensors.items() if isinstance(x, DTensor)}


def _sharding(x: DTensor, placements: Sequence[Placement]) -> frozenset[str]:
    """The axes of the mesh of x that shard anything."""
    names = x.device_mesh.mesh_dim_names or ()
    return frozenset(name for name, found in zip(names, placements, strict=True) if isinstance(found, Shard))


def _all_dtensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[DTensor, DTensor, DTensor]:
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join("DTensor" if isinstance(x, DTensor) else "local" for x in (q, k, v))
        more = "; sinks are a DTensor" if isinstance(sinks, DTensor) else ""
        raise ValueError(f"q, k, v are {kinds}{more}; pass all three as DTensors or all as local tensors")
    return q, k, v


def _sinks_gradient(sinks: DTensor, queries: Sequence[Placement]) -> list[Placement]:
    """Returns the placements of the gradient: each rank computes a share of the sum over batch and tokens."""
    heads = Shard(sinks.ndim - 1)
    gradient: dict[Placement, Placement] = {Shard(0): Partial(), Shard(1): Partial(), Shard(2): heads}
    return [gradient.get(placement, Replicate()) for placement in queries]
