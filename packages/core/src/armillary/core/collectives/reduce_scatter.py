"""Own tokens of what all ranks of an axis have, summed or apart: asynchronous, on local tensors, without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, PartsInFlight, check_tokens, start_parts
from armillary.core.mesh import Axis


def start_reduce_scatter(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """[B, sum(sizes), ...] on every rank -> [B, T, ...], this rank's tokens of the sum over all ranks.

    The transpose of `start_all_gather`, with its arguments. Each rank adds what the others send it, in rank order and
    in float32 at least: the same bits on every run, and one rounding to the dtype of `x`.

    Bytes sent: those of the other ranks' tokens in `x`, kind "reduce_scatter".
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    sent, _, parts, works = start_scatter(x, axis, sizes, dim)

    def assemble() -> Tensor:
        if axis.size == 1:
            return x
        total = parts[0].to(accumulation_dtype(x.dtype), copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    return Collective(axis, (sent, *parts), works, assemble)


def start_scatter_parts(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[tuple[Tensor, ...]]:
    """[B, sum(sizes), ...] on every rank -> this rank's tokens [B, T, ...] as each rank has them, in rank order.

    For sums of a caller's own, such as those of exponentials. Arguments and bytes are those of `start_reduce_scatter`.
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    sent, _, parts, works = start_scatter(x, axis, sizes, dim)
    return Collective(axis, (sent, *parts), works, lambda: parts)


def start_scatter(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> PartsInFlight:
    """Starts sending each rank its tokens of `x`.

    An all-to-all, because a reduce-scatter of the backend's adds in an order and a precision of its own.
    """
    parts = x.split(list(sizes), dim)
    packed = x.contiguous().view(-1) if prod(x.shape[:dim]) == 1 else None
    return start_parts(axis, parts, [parts[axis.rank].shape] * axis.size, "reduce_scatter", packed)
