"""Gathering and scattering tokens along one axis: asynchronous, on local tensors, without a gradient.

    start_all_gather     [B, T, ...]  -> [B, N, ...]    all tokens
    start_reduce_scatter [B, N, ...]  -> [B, T, ...]    own tokens of the sum over ranks
    start_scatter_parts  [B, N, ...]  -> C [B, T, ...]  own tokens of what each rank has
    start_merge_scatter  [B, N, H, D] -> [B, T, H, D]   own tokens of partial attention, merged by log-sum-exp

N are the tokens of the whole axis, T those of this rank. Attention methods are built of these; `primitives.py` has them
with gradients. All ranks of an axis must call the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.checked import check_tensor, integer
from armillary.core.collectives.collective import Collective, Parts, accumulation_dtype, start_parts
from armillary.core.mesh import Axis
from armillary.core.observe.trace import record, watched


def start_all_gather(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """[B, T, ...], this rank's tokens -> [B, sum(sizes), ...], those of all ranks, in rank order.

    Args:
        x: local; dim `dim` is `sizes[axis.rank]`. Must not be written to before `wait`.
        sizes: tokens of each rank of the axis. Where they differ, every rank sends as many as the longest has.
        dim: of the tokens.

    Bytes sent: (C - 1) times those of `x` padded to max(sizes), C = axis.size; kind "all_gather".
    """
    check_tokens("x", x, dim, sizes[axis.rank], sizes)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    shape = [*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]]
    sent = x.contiguous() if x.shape[dim] == max(sizes) else _padded(x, shape, dim)
    buffer = x.new_empty((axis.size, *shape))
    under_way = record(axis.name, "all_gather", (axis.size - 1) * sent.nbytes, axis.size - 1)
    work = compat.all_gather(buffer.view(-1), sent.view(-1), axis.group)

    def assemble() -> Tensor:
        if prod(shape[:dim]) == 1 and min(sizes) == max(sizes):
            return buffer.view(*shape[:dim], sum(sizes), *shape[dim + 1 :])
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(buffer, sizes, strict=True)], dim)

    return Collective(axis, (sent, buffer), watched([work], under_way), assemble)


def start_reduce_scatter(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 1) -> Collective[Tensor]:
    """[B, sum(sizes), ...] on every rank -> [B, T, ...], this rank's tokens of the sum over all ranks.

    The transpose of `start_all_gather`, with its arguments. Each rank adds what the others send it, in rank order and
    in float32 at least: the same bits on every run, and one rounding to the dtype of `x`.

    Bytes sent: those of the other ranks' tokens in `x`, kind "reduce_scatter".
    """
    check_tokens("x", x, dim, sum(sizes), sizes)
    sent, _, parts, works = _start_parts(x, axis, sizes, dim)

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
    sent, _, parts, works = _start_parts(x, axis, sizes, dim)
    return Collective(axis, (sent, *parts), works, lambda: parts)


def start_merge_scatter(
    out: Tensor, lse: Tensor, axis: Axis, sizes: Sequence[int]
) -> Collective[tuple[Tensor, Tensor]]:
    """Attention over each rank's keys -> attention over all keys, for this rank's tokens: a reduce-scatter by `merge_`.

    Merges in rank order, in float32 (float64 for float64). A row that no rank has seen anything for has out = 0 and
    lse = -inf, as it must have in what comes in.

    Args:
        out: [B, sum(sizes), H, Dv], local. Must not be written to before `wait`.
        lse: [B, sum(sizes), H], in the accumulation dtype; likewise.
        sizes: tokens of each rank of the axis.

    Returns:
        (out [B, T, H, Dv], lse [B, T, H]), in the dtypes that came in.

    Bytes sent: those of the other ranks' tokens in both, kind "reduce_scatter". Where sizes are equal, with T tokens on
    each of C ranks: (C - 1) (B T H Dv e + 4 B T H), or 8 in float64.
    """
    check_partial(out, lse, sizes)
    sent_out, _, outs, works = _start_parts(out, axis, sizes, 1)
    sent_lse, _, lses, more = _start_parts(lse, axis, sizes, 1)

    def assemble() -> tuple[Tensor, Tensor]:
        if axis.size == 1:
            return out, lse
        merged, total = outs[0].to(lse.dtype, copy=True), lses[0].clone()
        for part, part_lse in zip(outs[1:], lses[1:], strict=True):
            merge_(merged, total, part, part_lse)
        return merged.to(out.dtype), total

    return Collective(axis, (sent_out, *outs, sent_lse, *lses), (*works, *more), assemble)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges attention over some keys into that over others, in place: (out, lse) take in (part_out, part_lse).

    out [..., Dv] and lse [...] are accumulators. A row that has seen nothing, with lse = -inf, weighs nothing.
    """
    total = torch.logaddexp(lse, part_lse)
    out.lerp_(part_out.to(out.dtype), (part_lse - pivot(total)).exp_().unsqueeze(-1))
    lse.copy_(total)


def tokens_on(x: Tensor, dim: int) -> int:
    check_tensor("x", x)
    if not 0 <= integer("dim", dim) < x.ndim:
        raise ValueError(f"x {tuple(x.shape)} has no dim {dim}; its dims are 0..{x.ndim - 1}")
    return x.shape[dim]


def check_tokens(name: str, x: Tensor, dim: int, tokens: int, sizes: Sequence[int]) -> None:
    if tokens_on(x, dim) != tokens:
        raise ValueError(f"{name} {tuple(x.shape)} must have {tokens} tokens on dim {dim}: sizes are {tuple(sizes)}")


def check_partial(out: Tensor, lse: Tensor, sizes: Sequence[int]) -> None:
    if out.ndim != 4 or lse.shape != out.shape[:3] or lse.dtype != accumulation_dtype(out.dtype):
        raise ValueError(
            f"out {tuple(out.shape)} in {out.dtype} and lse {tuple(lse.shape)} in {lse.dtype} do not fit together; "
            f"lse must be {tuple(out.shape[:3])} in {accumulation_dtype(out.dtype)}, and out have 4 dims"
        )
    check_tokens("out", out, 1, sum(sizes), sizes)


def _start_parts(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> Parts:
    """Starts sending each rank its tokens of `x`.

    An all-to-all, because a reduce-scatter of the backend's adds in an order and a precision of its own.
    """
    parts = x.split(list(sizes), dim)
    packed = x.contiguous().view(-1) if prod(x.shape[:dim]) == 1 else None
    return start_parts(axis, parts, [parts[axis.rank].shape] * axis.size, "reduce_scatter", packed)


def _padded(x: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """`x` at the beginning of a tensor of `shape`; the rest is not written."""
    padded = x.new_empty(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def pivot(lse: Tensor) -> Tensor:
    """`lse`, but 0 where nothing was seen: then weights exp(-inf - pivot) are 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
