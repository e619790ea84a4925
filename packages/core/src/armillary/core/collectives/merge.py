"""The log-sum-exp merge of attention over disjoint keys: locally, and over the ranks of an axis, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, cast
from warnings import warn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.core import compat
from armillary.core.collectives.collective import (
    Collective,
    accumulation_dtype,
    check_tokens,
    start_all_gather,
    start_scatter,
)
from armillary.core.ledger import phase
from armillary.core.mesh import Axis

MAX_DIMS = 4
"""Largest number of dims of `out` in the fused kernel: [B, T, H, Dv]."""
MAX_ROWS = 2**31 - 2**16
"""Largest number of elements of `lse`, the rows of the fused kernel, which numbers them in 32 bits."""


def start_merge_scatter(
    out: Tensor, lse: Tensor, axis: Axis, sizes: Sequence[int]
) -> Collective[tuple[Tensor, Tensor]]:
    """Starts a reduce-scatter whose reduction is `merge_`: of attention over each rank's keys into that over all keys.

    Merges in rank order, in float32 (float64 for float64). A row without visible keys has out = 0 and lse = -inf, in
    the input and in the result.

    Args:
        out: [B, sum(sizes), H, Dv], a local tensor. Must not be written to before `wait`.
        lse: [B, sum(sizes), H], local, in float32 (float64 if `out` is). Must not be written to before `wait`.

    Returns:
        (out [B, T, H, Dv], lse [B, T, H]) of this rank's T tokens, in the dtypes of the inputs.

    Bytes sent: the other ranks' tokens of `out` and `lse`, kind "reduce_scatter". With T tokens on every rank:
    (C - 1) (B T H Dv e + 4 B T H), or 8 instead of 4 in float64.
    """
    check_partial(out, lse, sizes)
    sent_out, outs, out_works = start_scatter(out, axis, sizes, 1)
    sent_lse, lses, lse_works = start_scatter(lse, axis, sizes, 1)

    def assemble() -> tuple[Tensor, Tensor]:
        if axis.size == 1:
            return out, lse
        # Copies, because `merge_` works in place. `out` is accumulated in the dtype of lse.
        merged_out, merged_lse = outs[0].to(lse.dtype, copy=True), lses[0].clone()
        for part_out, part_lse in zip(outs[1:], lses[1:], strict=True):
            merge_(merged_out, merged_lse, part_out, part_lse)
        return merged_out.to(out.dtype), merged_lse

    return Collective(axis, (sent_out, *outs, sent_lse, *lses), (*out_works, *lse_works), assemble)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges attention over some keys, (part_out, part_lse), into attention over other keys, (out, lse), in place.

    out [..., Dv] and lse [...] are accumulators, in float32 or wider. A row with lse = -inf has weight 0.

    On CUDA this is one Triton kernel if Triton is available and `fuses` accepts the tensors. For part_out in 16 bits it
    moves 10 bytes per element: reads 2 of part_out and 4 of out, writes 4 of out. torch's ops move 18.
    """
    # Inductor fuses torch's ops itself.
    if not torch.compiler.is_compiling() and fuses(out, lse, part_out, part_lse):
        kernel = fused_kernel(out.device.type)
        if kernel is not None:
            kernel(out, lse, part_out, part_lse)
            return
    merge_by_ops_(out, lse, part_out, part_lse)


MergeKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@cache
@compat.outside_modes  # on fake tensors the trial would fail, and the kernel be off for the whole process
def fused_kernel(device_type: str) -> MergeKernel | None:
    """Returns the fused kernel for "cuda"; None for other devices, without Triton, and if Triton cannot compile it."""
    if device_type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from armillary.core.collectives.fused_merge import fused_merge_

        # Compiles the kernel in a trial, so that a failure occurs here and not in the middle of attention.
        fused_merge_(*trial_tensors(device_type))
    except Exception as error:  # no C compiler, unknown driver, old GPU: Triton raises many types
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warn(f"partial attention is merged by several kernels: Triton does not compile one ({reason})", stacklevel=3)
        return None
    return fused_merge_


def trial_tensors(device_type: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Triton compiles a program for each dtype and head dim, and others for arguments that 16 does not divide. These
    # tensors get the program of models in bfloat16 with head dim 128, and tokens and heads in multiples of 16. As from
    # flash attention, lse has [B, H, T] in memory.
    tokens, heads, dim = 16, 16, 128
    out = torch.zeros(1, tokens, heads, dim, device=device_type)
    lse, part_lse = (torch.zeros(1, heads, tokens, device=device_type).transpose(1, 2) for _ in range(2))
    return out, lse, out.to(torch.bfloat16), part_lse


def fuses(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> bool:
    """Returns True if the fused kernel accepts these tensors: plain, without a gradient, in the dtypes of attention."""
    tensors = (out, lse, part_out, part_lse)
    are_plain = all(type(x) is Tensor for x in tensors) and not compat.transforms_on()  # not fake, not DTensors
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    shapes = part_out.shape == out.shape and lse.shape == part_lse.shape == out.shape[:-1]
    dtypes = out.dtype == lse.dtype == part_lse.dtype == accumulation_dtype(out.dtype) and part_out.is_floating_point()
    return are_plain and not needs_grad and shapes and dtypes and out.ndim <= MAX_DIMS and lse.numel() <= MAX_ROWS


def merge_by_ops_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    # out += w (part_out - out) with w = e^part_lse / (e^lse + e^part_lse) = sigmoid(part_lse - lse).
    # If neither part has visible keys, -inf - -inf is NaN: w is then 0.
    weight = (part_lse - lse).sigmoid_().nan_to_num_(0.0)
    torch.logaddexp(lse, part_lse, out=lse)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))


# -- the gradient of the merge over ranks -----------------------------------------------------------------------------


class _MergeScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, axis: Axis, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        merged_out, merged_lse = start_merge_scatter(out, lse, axis, sizes).wait()
        ctx.call = axis, sizes
        ctx.save_for_backward(out, lse, merged_out, merged_lse)
        return merged_out, merged_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dout, dlse), (out, lse, merged_out, merged_lse), (axis, sizes) = grads, ctx.saved_tensors, ctx.call
        # out, lse: the merged result; out_r, lse_r: attention over the keys of rank r; w_r = exp(lse_r - lse): its
        # weight; a . b: the dot product over the head dim. The gradients of rank r are
        #     d(out_r) = w_r d(out)
        #     d(lse_r) = w_r (d(out) . out_r + d(lse) - d(out) . out)
        # Each rank has d(out), d(lse), out and lse of its own tokens only, and needs d(out) of all tokens and two
        # numbers per row: lse, and d(lse) - d(out) . out.
        rows = torch.stack([merged_lse, dlse - (dout.to(lse.dtype) * merged_out).sum(-1)], dim=-1)
        with phase("backward"):  # both gathers are in flight together
            gathers = start_all_gather(dout, axis, sizes), start_all_gather(rows, axis, sizes)
        dout, rows = gathers[0].wait(), gathers[1].wait()
        # w_r of every row; 0 for rows without visible keys.
        weight = (lse - pivot(rows[..., 0])).exp()
        dlse = weight * ((dout.to(lse.dtype) * out).sum(-1) + rows[..., 1])
        return (weight.unsqueeze(-1) * dout).to(out.dtype), dlse, None, None


def merge(out: Tensor, lse: Tensor, axis: Axis, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    if axis.size == 1:
        check_partial(out, lse, sizes)
        return out, lse
    return cast(tuple[Tensor, Tensor], _MergeScatter.apply(out, lse, axis, tuple(sizes)))


def check_partial(out: Tensor, lse: Tensor, sizes: Sequence[int]) -> None:
    if out.ndim != 4 or lse.shape != out.shape[:3] or lse.dtype != accumulation_dtype(out.dtype):
        raise ValueError(
            f"out {tuple(out.shape)} in {out.dtype} and lse {tuple(lse.shape)} in {lse.dtype} do not fit together; "
            f"lse must be {tuple(out.shape[:3])} in {accumulation_dtype(out.dtype)}, and out have 4 dims"
        )
    check_tokens("out", out, 1, sum(sizes), sizes)


def pivot(lse: Tensor) -> Tensor:
    """Returns `lse` with 0 in place of -inf, so that weights exp(-inf - pivot) are 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
