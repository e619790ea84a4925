"""`merge_` as one Triton kernel that reads and writes each element once. Imported at its first use on CUDA."""

# pyright: basic
# Not strict, because Triton has no types and the arguments of a kernel cannot be annotated.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 1024
"""Maximum number of elements of a row, out of the head dim, that a program holds at a time."""
ELEMENTS = 4096
"""Elements that a program holds at a time, in all of its rows: 32 for each of the 128 threads of four warps."""


@triton.jit
def _merge_rows(
    out,
    lse,
    part_out,
    part_lse,
    rows,
    tokens,
    heads,
    dim,
    out_batch,
    out_token,
    out_head,
    out_dim,
    lse_batch,
    lse_token,
    lse_head,
    part_batch,
    part_token,
    part_head,
    part_dim,
    part_lse_batch,
    part_lse_token,
    part_lse_head,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # A row is one head of one token, and has `dim` elements of out. The arguments from out_batch on are strides.
    # Rows are numbered in 32 bits: 64-bit divisions would take as long as the loads and stores.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head, token, batch = row % heads, row // heads % tokens, row // heads // tokens
    # Offsets need 64 bits: 2^31 elements of float32 are only 8 GB.
    head, token, batch = head.to(tl.int64), token.to(tl.int64), batch.to(tl.int64)
    lse_at = lse + batch * lse_batch + token * lse_token + head * lse_head
    part_lse_at = part_lse + batch * part_lse_batch + token * part_lse_token + head * part_lse_head
    lse_value = tl.load(lse_at, mask=inside, other=0.0)
    part_lse_value = tl.load(part_lse_at, mask=inside, other=0.0)

    # weight = sigmoid(part_lse - lse) and total = log(e^lse + e^part_lse), both from e^-|gap|, which cannot overflow.
    # If neither part has visible keys, -inf - -inf is NaN: the weight is then 0.
    gap = part_lse_value - lse_value
    decay = tl.exp(-tl.abs(gap))
    weight = tl.where(gap >= 0, 1.0, decay) / (1.0 + decay)
    weight = tl.where(weight == weight, weight, 0.0)
    larger = tl.where(lse_value > part_lse_value, lse_value, part_lse_value)
    total = larger + tl.log(1.0 + tl.where(lse_value == part_lse_value, 1.0, decay))

    out_at = out + batch * out_batch + token * out_token + head * out_head
    part_at = part_out + batch * part_batch + token * part_token + head * part_head
    for start in range(0, dim, WIDTH):
        column = (start + tl.arange(0, WIDTH)).to(tl.int64)
        valid = inside[:, None] & (column < dim)[None, :]
        old = tl.load(out_at[:, None] + column[None, :] * out_dim, mask=valid, other=0.0)
        new = tl.load(part_at[:, None] + column[None, :] * part_dim, mask=valid, other=0.0).to(old.dtype)
        row_weight = weight[:, None]
        # out += weight * (part_out - out), in the form of torch.lerp, which is exact for weights 0 and 1.
        blended = tl.where(row_weight < 0.5, old + row_weight * (new - old), new - (new - old) * (1.0 - row_weight))
        tl.store(out_at[:, None] + column[None, :] * out_dim, blended, mask=valid)
    tl.debug_barrier()  # all threads of a row have read its lse before one of them overwrites it
    tl.store(lse_at, total, mask=inside)


def fused_merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    # `merge_` checks the arguments. No two elements of out or lse may be at the same address, as in expanded tensors.
    if out.numel() == 0:
        return
    batch, tokens, heads = (1,) * (3 - lse.ndim) + tuple(lse.shape)
    rows, dim = batch * tokens * heads, out.shape[-1]
    width = min(triton.next_power_of_2(dim), MAX_WIDTH)
    per_program = max(1, ELEMENTS // width)
    strides = (*_strides(out, 4), *_strides(lse, 3), *_strides(part_out, 4), *_strides(part_lse, 3))
    with torch.cuda.device_of(out):  # Triton launches on the current device, not that of the tensors
        _merge_rows[triton.cdiv(rows, per_program),](
            out,
            lse,
            part_out,
            part_lse,
            rows,
            tokens,
            heads,
            dim,
            *strides,
            ROWS=per_program,
            WIDTH=width,
            enable_fp_fusion=True,  # pyright: ignore[reportCallIssue] - an option of the compiler
        )


def _strides(x: Tensor, dims: int) -> tuple[int, ...]:
    return (0,) * (dims - x.ndim) + x.stride()
