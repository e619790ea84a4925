"""Attention on DTensors: placements are checked, the method attends on local tensors, and DTensors come back."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention.parallel_checks import TakesLocal, check_placed, check_traced
from armillary.attention.spec import AttentionOptions
from armillary.core.placements import Placed, dtensor_like, local_of


def attend_dtensors(
    method: TakesLocal, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> DTensor | tuple[DTensor, DTensor]:
    """`method(q, k, v, ...)` on DTensors over a mesh with the method's axes, all three placed alike.

    Placements are `Shard(1)` on the axes of the method, outer ones before inner ones in the mesh; so rank r * U + u of
    `ring x ulysses` has chunk r * U + u, as it has shard r * U + u of the layout. Heads may be `Shard(2)` on others
    (tp) that divide H and K, and stay there; the batch may be `Shard(0)`. Global views hold tokens in the order of the
    layout's shards. Gradients come back placed as what they are gradients of.

    Args:
        sinks: [H of this rank], local; or a DTensor [H], `Shard(0)` where heads are sharded and else `Replicate`. The
            gradient of a DTensor is `Partial` wherever batch or tokens are sharded.
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
    q, k, v = _all_dtensors(q, k, v)
    tensors = (q, k, v, sinks) if isinstance(sinks, DTensor) else (q, k, v)
    check = check_traced if torch.compiler.is_compiling() else check_placed
    check(method, [Placed(x.device_mesh, x.placements, tuple(x.shape)) for x in tensors], options)
    if isinstance(sinks, DTensor):
        sinks = local_of(sinks, _sinks_gradient(q))
    local = local_of(q), local_of(k), local_of(v)
    found = cast(Any, method)(*local, sinks=sinks, **options._asdict())
    out, lse = found if options.return_lse else (found, None)
    out = dtensor_like(q, out, (*q.shape[:3], v.shape[3]))
    return out if lse is None else (out, dtensor_like(q, lse, q.shape[:3]))


def _all_dtensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[DTensor, DTensor, DTensor]:
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join("DTensor" if isinstance(x, DTensor) else "local" for x in (q, k, v))
        raise ValueError(f"q, k, v are {kinds}; pass all three as DTensors or all as local tensors")
    return q, k, v


def _sinks_gradient(q: DTensor) -> list[Placement]:
    """Each rank's gradient is a share of the sum over batch and tokens."""
    known: dict[Placement, Placement] = {Shard(0): Partial(), Shard(1): Partial(), Shard(2): Shard(0)}
    return [known.get(found, Replicate()) for found in q.placements]
