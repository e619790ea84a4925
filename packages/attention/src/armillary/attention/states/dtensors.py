"""Layers with a state on DTensors: placements are checked, local tensors computed, and DTensors returned."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention.states.calls import RECURRENCES, StateOptions, run_layer
from armillary.core import Axis, compat
from armillary.core.placements import (
    check_chunks,
    check_placement,
    chunk_sizes,
    describe,
    dtensor_like,
    local_of,
    mesh_dim,
)


@compat.outside_graphs
def run_on_dtensors(
    layer: str, options: StateOptions, inputs: Mapping[str, Tensor], initial_state: Tensor | None
) -> tuple[DTensor, DTensor]:
    """Runs a layer on DTensors over a mesh that has the axis.

    Tensors of tokens are placed alike: `Shard(1)` on the axis, whose shards must be as long as DTensor's own chunks; on
    other axes heads may be `Shard(2)` (tp), if the axis divides H and K, and the batch `Shard(0)`. Global views hold
    tokens in the order of the layout's shards. Gradients are placed like the tensors they are gradients of.

    Args:
        options: the mask is of this rank's rows of the batch.
        inputs: by name. "A" may be local, [H] of this rank's heads; or a DTensor of all heads, sharded where heads are
            and `Replicate` elsewhere. The gradient of a DTensor is `Partial` wherever batch or tokens are sharded.
        initial_state: local, of this rank's rows and heads; or a DTensor [B, H, ...], sharded where rows and heads are
            and `Replicate` on the axis, on which its gradient is `Partial`.

    Returns:
        (out, placed like the tokens; final [B, H, Dk, Dv], sharded where rows and heads are, `Replicate` on the axis).

    Raises:
        ValueError: DTensors mixed with local tensors; placements, shards or heads that do not fit. Raised before any
            communication.
    """
    tokens = _tokens({name: x for name, x in inputs.items() if name != "A"})
    first = next(iter(tokens.values()))
    axis = None if options.axis is None else Axis.of(options.axis)
    axis_dim = None if axis is None else mesh_dim(first, axis)
    for name, x in tokens.items():
        _check(name, x, axis_dim)
    if axis is not None and options.layout is not None and options.layout.shards == axis.size:
        check_chunks("the layout's shards", options.layout.sizes, chunk_sizes(first.shape[1], axis.size), axis.name)
    # Placements of [H] and of [B, H, ...], where tokens are sharded over batch, tokens and heads.
    of_heads: list[Placement] = [Shard(0) if placement == Shard(2) else Replicate() for placement in first.placements]
    state_placements: dict[Placement, Placement] = {Shard(0): Shard(0), Shard(2): Shard(1)}
    of_states = [state_placements.get(placement, Replicate()) for placement in first.placements]
    local_inputs = {name: local_of(x) for name, x in tokens.items()}
    if "A" in inputs:
        local_inputs["A"] = _replicated("A", inputs["A"], first, of_heads)
    state = None if initial_state is None else _replicated("initial_state", initial_state, first, of_states)
    local_out, local_final = run_layer(layer, options, [local_inputs[name] for name in inputs], state)
    values, keys = (list(inputs.values())[i] for i in RECURRENCES[layer][1:])
    if axis is not None and axis.size > 1:
        local_final = cast(Tensor, _GradientOfFirstRank.apply(local_final, axis.rank == 0))
    final_shape = (values.shape[0], values.shape[2], keys.shape[3], values.shape[3])
    final = dtensor_like(first, local_final, final_shape, dict(enumerate(of_states)))
    return dtensor_like(first, local_out, values.shape), final


class _GradientOfFirstRank(torch.autograd.Function):
    """The identity. The gradient of a replicated DTensor is the same on all ranks; the layer adds it up over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None


def _tokens(inputs: Mapping[str, Tensor]) -> dict[str, DTensor]:
    """Raises ValueError unless all are DTensors that are placed alike."""
    tokens = {name: x for name, x in inputs.items() if isinstance(x, DTensor)}
    if len(tokens) < len(inputs):
        kinds = ", ".join(f"{name} {'DTensor' if name in tokens else 'local'}" for name in inputs)
        raise ValueError(f"{kinds}: pass all as DTensors, or the local part of each, x.to_local()")
    first = next(iter(tokens.values()))
    if any(x.device_mesh != first.device_mesh or x.placements != first.placements for x in tokens.values()):
        descriptions = ", ".join(f"{name} {describe(x)}" for name, x in tokens.items())
        raise ValueError(f"{descriptions}: all must be placed alike on one mesh")
    return tokens


def _check(name: str, x: DTensor, axis_dim: int | None) -> None:
    """Checks the placements of tokens [B, T, H, ...]."""
    if axis_dim is not None:
        check_placement(name, x, axis_dim, Shard(1))
    for dim, placement in enumerate(x.placements):
        if dim == axis_dim or x.device_mesh.size(dim) == 1 or placement in (Shard(0), Shard(2), Replicate()):
            continue
        axis_name = (x.device_mesh.mesh_dim_names or ())[dim]
        raise ValueError(
            f"{name} is {placement!r} on axis {axis_name!r} of {describe(x)}; Shard(0), Shard(2) or Replicate() is "
            "accepted besides the axis of the tokens; `redistribute` it first"
        )
    # Heads must be cut evenly, so that the value heads of a group stay with their key head.
    head_ranks = prod(x.device_mesh.size(dim) for dim, placement in enumerate(x.placements) if placement == Shard(2))
    if head_ranks > 1 and (x.ndim < 3 or x.shape[2] % head_ranks):
        raise ValueError(
            f"{name} is {describe(x)}; its heads are sharded over {head_ranks} ranks, which must divide them"
        )


def _replicated(name: str, x: Tensor, tokens: DTensor, expected: list[Placement]) -> Tensor:
    """Returns the local part of a tensor without tokens. Its gradient is a share where batch or tokens are sharded."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != tokens.device_mesh:
        raise ValueError(f"{name} is {describe(x)}; it must be on the mesh of the tokens, {describe(tokens)}")
    for dim, placement in enumerate(expected):
        check_placement(name, x, dim, placement)
    shares = [
        Partial() if placement == Replicate() and isinstance(of_tokens, Shard) else placement
        for placement, of_tokens in zip(expected, tokens.placements, strict=True)
    ]
    return local_of(x, shares)
