"""Layers with a state on DTensors: checks placements, runs the layer on local tensors, and returns DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from armillary.core import Axis
from armillary.core.parts import compat, dtensor
from armillary.states.calls import RECURRENCES, StateOptions, run_layer

STATE_DIMS = {0: 0, 2: 1}
"""Batch and heads: dims of tokens [B, T, H, ...] by dims of states [B, H, ...]."""


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
    without_tokens = {"A": inputs.get("A"), "initial_state": initial_state}
    tokens = dtensor.check_kinds({name: x for name, x in inputs.items() if name not in without_tokens}, without_tokens)
    dtensor.check_alike(tokens)
    axes = [] if options.axis is None else [Axis.of(options.axis)]
    # `run_layer` raises if the layout has another number of shards.
    layout = options.layout
    sizes = layout.sizes if layout is not None and axes and layout.shards == axes[0].size else None
    for name, x in tokens.items():
        dtensor.check_tokens_and_heads(name, x, axes, sizes)
    # Tensors without tokens, [H] and [B, H, ...], beside tokens [B, T, H, ...].
    first_name, first = next(iter(tokens.items()))
    local_tensors = {name: dtensor.local_of(x) for name, x in tokens.items()}
    for name, dims in (("A", {2: 0}), ("initial_state", STATE_DIMS)):
        x = without_tokens[name]
        if isinstance(x, DTensor):
            dtensor.check_beside(name, x, first_name, first, dims)
            x = dtensor.local_of(x, dtensor.sharding_axes(first))
        if x is not None:
            local_tensors[name] = x
    state = local_tensors.get("initial_state")
    local_out, local_final = run_layer(layer, options, [local_tensors[name] for name in inputs], state)
    tensors, recurrence = list(inputs.values()), RECURRENCES[layer]
    values, keys = tensors[recurrence.value_index], tensors[recurrence.key_index]
    if axes and axes[0].size > 1:  # `final` is replicated on the axis
        local_final = cast(Tensor, _GradientOfFirstRank.apply(local_final, axes[0].rank == 0))
    final_shape = (values.shape[0], values.shape[2], keys.shape[3], values.shape[3])
    state_placements = dict(enumerate(dtensor.placements_beside(first, STATE_DIMS)))
    final = dtensor.result_like(first, local_final, final_shape, state_placements)
    return dtensor.result_like(first, local_out, values.shape), final


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
