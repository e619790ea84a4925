"""Merging attention over some keys with attention over others by log-sum-exp, here and over the ranks of an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from warnings import warn

import torch
from torch import Tensor

from armillary.core import compat
from armillary.core.accumulate import accumulation_dtype
from armillary.core.collectives.collective import Collective, check_tokens
from armillary.core.collectives.reduce_scatter import start_scatter
from armillary.core.mesh import Axis

MOST_DIMS = 4
"""Of `out` in the fused kernel: [B, T, H, Dv], of which any but the last may be left out."""
MOST_ROWS = 2**31 - 2**16
"""Of `lse` in the fused kernel, which numbers them in 32 bits."""


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
    sent_out, outs, works = start_scatter(out, axis, sizes, 1)
    sent_lse, lses, more = start_scatter(lse, axis, sizes, 1)

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

    On CUDA one Triton kernel, where there is one: 10 bytes an element of a partial result in 16 bits, where torch's ops
    move 18.
    """
    if not torch.compiler.is_compiling():  # a compiler fuses the ops by itself
        kernel = fused_kernel(out.device.type)
        if kernel is not None and fuses(out, lse, part_out, part_lse):
            kernel(out, lse, part_out, part_lse)
            return
    merge_by_ops_(out, lse, part_out, part_lse)


MergeKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@cache
def fused_kernel(device_type: str) -> MergeKernel | None:
    """The fused kernel for tensors of a type of device; None where Triton is not installed, or compiles nothing."""
    if device_type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from armillary.core.collectives.fused_merge import fused_merge_

        fused_merge_(*(torch.zeros(shape, device=device_type) for shape in ((1, 1), 1, (1, 1), 1)))
    except Exception as error:  # no C compiler, no driver that Triton knows, an older GPU: whatever it raises
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warn(f"partial attention is merged by several kernels: Triton does not compile one ({reason})", stacklevel=3)
        return None
    return fused_merge_


def fuses(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> bool:
    """Whether the fused kernel takes these: plain tensors that nothing differentiates, in the dtypes of attention."""
    tensors = (out, lse, part_out, part_lse)
    plain = all(type(x) is Tensor for x in tensors) and not compat.transforms_on()  # no fake ones, no DTensors
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    shapes = part_out.shape == out.shape and lse.shape == part_lse.shape == out.shape[:-1]
    dtypes = out.dtype == lse.dtype == part_lse.dtype == accumulation_dtype(out.dtype) and part_out.is_floating_point()
    return plain and not differentiated and shapes and dtypes and out.ndim <= MOST_DIMS and lse.numel() <= MOST_ROWS


def merge_by_ops_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`merge_` by torch's ops, on any device."""
    weight = (part_lse - lse).sigmoid_().nan_to_num_(0.0)  # -inf - -inf is no number: neither has seen anything
    torch.logaddexp(lse, part_lse, out=lse)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))


def check_partial(out: Tensor, lse: Tensor, sizes: Sequence[int]) -> None:
    if out.ndim != 4 or lse.shape != out.shape[:3] or lse.dtype != accumulation_dtype(out.dtype):
        raise ValueError(
            f"out {tuple(out.shape)} in {out.dtype} and lse {tuple(lse.shape)} in {lse.dtype} do not fit together; "
            f"lse must be {tuple(out.shape[:3])} in {accumulation_dtype(out.dtype)}, and out have 4 dims"
        )
    check_tokens("out", out, 1, sum(sizes), sizes)


def pivot(lse: Tensor) -> Tensor:
    """`lse`, but 0 where nothing was seen: then weights exp(-inf - pivot) are 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
