"""Layers with a state on DTensors: checks placements, runs the layer on local tensors, and returns DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention.call.dtensor_checks import check_heads, check_token_placements
from armillary.attention.states.calls import RECURRENCES, StateOptions, run_layer
from armillary.core import Axis
from armillary.core.parts import check_chunks, check_placement, chunk_sizes, compat, describe, dtensor_like, local_of


@compat.outside_graphs
def run_on_dtensors(
    layer: str, options: StateOptions, inputs: Mapping[str, Tensor], initial_state: Tensor | None
) -> tuple[DTensor, DTensor]:
    """Runs a layer on DTensors over a mesh that has the axis.

    All inputs with a token dim have the same placements: `Shard(1)` on the axis, with the shard sizes that DTensor
    computes; on other axes `Shard(2)` (heads, if the axis divides H and K), `Shard(0)` (batch) or `Replicate`. In the
    global view, tokens are in the order of the layout's shards. Gradients have the placements of their tensors.

    Args:
        options: options of the layer; the mask is that of this rank's rows of the batch.
        inputs: by name. "A" is [H]: a local tensor of this rank's heads, or a DTensor with `Shard(0)` on the axes that
            shard heads and `Replicate` on the others. Its gradient is `Partial` on axes that shard batch or tokens.
        initial_state: [B, H, ...]: a local tensor of this rank's rows and heads, or a DTensor with `Shard(0)` and
            `Shard(1)` on the axes that shard batch and heads, and `Replicate` on the sequence axis, on which its
            gradient is `Partial`.

    Returns:
        (out, with the placements of the inputs; final state [B, H, Dk, Dv], with those of `initial_state`).

    Raises:
        ValueError: DTensors mixed with local tensors; placements, shard sizes or head counts that are not as above.
            Raised before any communication.
    """
    tokens = _check_same_placements({name: x for name, x in inputs.items() if name != "A"})
    first = next(iter(tokens.values()))
    axis = None if options.axis is None else Axis.of(options.axis)
    axes = [] if axis is None else [axis]
    for name, x in tokens.items():
        check_token_placements(name, x, axes, (Shard(0), Shard(2), Replicate()))
        check_heads(name, x)
    if axis is not None and options.layout is not None and options.layout.shards == axis.size:
        check_chunks("the layout's shards", options.layout.sizes, chunk_sizes(first.shape[1], axis.size), axis.name)
    # Placements of A [H] and of states [B, H, ...], from those of tokens [B, T, H, ...].
    head_placements: list[Placement] = [Shard(0) if p == Shard(2) else Replicate() for p in first.placements]
    state_placement: dict[Placement, Placement] = {Shard(0): Shard(0), Shard(2): Shard(1)}
    state_placements = [state_placement.get(placement, Replicate()) for placement in first.placements]
    local_inputs = {name: local_of(x) for name, x in tokens.items()}
    if "A" in inputs:
        local_inputs["A"] = _local_part("A", inputs["A"], first, head_placements)
    state = None if initial_state is None else _local_part("initial_state", initial_state, first, state_placements)
    local_out, local_final = run_layer(layer, options, [local_inputs[name] for name in inputs], state)
    tensors, recurrence = list(inputs.values()), RECURRENCES[layer]
    values, keys = tensors[recurrence.value_index], tensors[recurrence.key_index]
    if axis is not None and axis.size > 1:  # `final` is replicated on the axis
        local_final = cast(Tensor, _GradientOfFirstRank.apply(local_final, axis.rank == 0))
    final_shape = (values.shape[0], values.shape[2], keys.shape[3], values.shape[3])
    final = dtensor_like(first, local_final, final_shape, dict(enumerate(state_placements)))
    return dtensor_like(first, local_out, values.shape), final


class _GradientOfFirstRank(torch.autograd.Function):
    """The identity. Backward keeps the gradient on one rank of the axis.

    The gradient of a replicated DTensor is complete on every rank, but the layer's backward sums gradients of the final
    state over ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None


def _check_same_placements(inputs: Mapping[str, Tensor]) -> dict[str, DTensor]:
    """Returns the inputs. Raises ValueError unless all are DTensors on one mesh with the same placements."""
    tokens = {name: x for name, x in inputs.items() if isinstance(x, DTensor)}
    if len(tokens) < len(inputs):
        kinds = ", ".join(f"{name} {'DTensor' if name in tokens else 'local'}" for name in inputs)
        raise ValueError(f"{kinds}: pass all as DTensors, or the local part of each, x.to_local()")
    first = next(iter(tokens.values()))
    if any(x.device_mesh != first.device_mesh or x.placements != first.placements for x in tokens.values()):
        descriptions = ", ".join(f"{name} {describe(x)}" for name, x in tokens.items())
        raise ValueError(f"{descriptions}: all must be placed alike on one mesh")
    return tokens


def _local_part(name: str, x: Tensor, tokens: DTensor, expected: list[Placement]) -> Tensor:
    """Returns the local part of a tensor without a token dim.

    Its gradient is `Partial` on axes that shard the batch or the tokens, because each rank has a share of it.
    """
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != tokens.device_mesh:
        raise ValueError(f"{name} is {describe(x)}; it must be on the mesh of the tokens, {describe(tokens)}")
    for dim, placement in enumerate(expected):
        check_placement(name, x, dim, placement)
    gradient_placements = [
        Partial() if placement == Replicate() and isinstance(token_placement, Shard) else placement
        for placement, token_placement in zip(expected, tokens.placements, strict=True)
    ]
    return local_of(x, gradient_placements)
