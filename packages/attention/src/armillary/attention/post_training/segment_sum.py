"""Sums of per-token values for each sequence, over all ranks that have some of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.context_parallel.communication import method_axes, sum_over_axes
from armillary.attention.methods.base import Method
from armillary.core import Axis, accumulation_dtype
from armillary.core.parts import check_tensor, integer

Axes = Method | Sequence[DeviceMesh | Axis]
"""All axes over which tokens or rows differ: a method, for its axes, or a list of 1-D meshes or axes."""
Reduction = Literal["summed", "averaged"]
"""Reduction of parameters' gradients over ranks after backward; see `segment_sum`."""


def segment_sum(
    values: Tensor, sequences: Tensor, count: int, axes: Axes = (), *, gradients: Reduction = "summed"
) -> Tensor:
    """Returns the sums of each sequence over all ranks, [count] or [count, K], with the same bits on every rank.

    The result is one tensor of which each rank has a copy. Every rank calls backward with the same upstream gradient;
    the gradient of a value is that of its sequence (times a factor, see `gradients`), without communication.

    Args:
        values: floating-point [...] shaped as `sequences`, or [..., K] for K sums of each sequence, in one message.
        sequences: integers, the number of each value's sequence, numbered over all ranks of `axes`; negative for values
            of no sequence.
        count: number of sequences of all ranks.
        axes: see `Axes`.
        gradients: how gradients of parameters are reduced over these ranks after backward: "summed", by
            `sum_gradients`, or "averaged", by FSDP2 or DDP alone. "averaged" multiplies gradients by the number of
            ranks, so that their average is the sum.

    Bytes sent: 2 (R - 1) / R count K w for each axis of R ranks, with w = 4 (8 in float64); kind "all_reduce".

    Raises:
        ValueError: shapes or dtypes that do not match; a negative `count`; another `gradients`; a method whose axes are
            unknown. Raised before any communication.
        IndexError: a sequence number of `count` or more, on the CPU. On a GPU it is an assertion of torch's kernel.
    """
    check_tensor("values", values)
    check_tensor("sequences", sequences)
    count = integer("count", count, minimum=0)
    if gradients not in get_args(Reduction):
        raise ValueError(f"gradients={gradients!r}: accepted are {', '.join(get_args(Reduction))}")
    if sequences.is_floating_point() or values.shape[: sequences.ndim] != sequences.shape:
        raise ValueError(
            f"sequences must be integers shaped as values; got {sequences.dtype} {tuple(sequences.shape)} for values "
            f"{tuple(values.shape)}"
        )
    if values.ndim > sequences.ndim + 1 or not values.is_floating_point():
        raise ValueError(f"values {tuple(values.shape)} {values.dtype}: floating-point [...] or [..., K] is accepted")
    reduced_axes = list(method_axes(axes)) if isinstance(axes, Method) else [Axis.of(axis) for axis in axes]
    # Values of no sequence are added to row 0, which is dropped. Numbers out of range are left to index_put, because a
    # check here would wait for the GPU.
    rows = (sequences.flatten().long() + 1).clamp(min=0)
    flat = values.reshape(len(rows), *values.shape[sequences.ndim :])
    sums = flat.new_zeros((count + 1, *flat.shape[1:]), dtype=accumulation_dtype(values.dtype))
    sums = sums.index_put((rows,), flat.to(sums.dtype), accumulate=True)[1:]
    # The factor cancels the division by the number of ranks in the average of FSDP2 or DDP.
    factor = prod(axis.size for axis in reduced_axes) if gradients == "averaged" else 1
    return cast(Tensor, _SegmentSum.apply(sums, [axis for axis in reduced_axes if axis.size > 1], factor))


class _SegmentSum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the upstream gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[Axis], factor: int) -> Tensor:
        ctx.factor = factor
        return sum_over_axes(x.detach(), axes) if axes else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * ctx.factor, None, None
