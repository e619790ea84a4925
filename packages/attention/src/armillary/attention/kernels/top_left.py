"""torch's kernels for full rectangles and causal masks aligned at the top left, on the CPU and for float32 on CUDA.

`cut_band` cuts any other band into such pieces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from armillary.attention.kernels.inputs import HALVES, HeadDims, Inputs, Limits
from armillary.attention.kernels.kernel import (
    BackwardTensors,
    Batched,
    Kernel,
    Scores,
    Tile,
    contiguous_rows,
    pad_head_dims,
)
from armillary.attention.mask import Window
from armillary.core import accumulation_dtype

_aten = cast(Any, torch.ops.aten)
_cpu_forward: Any = _aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_efficient_forward: Any = _aten._efficient_attention_forward
_efficient_backward: Any = _aten._efficient_attention_backward


class TopLeft(Kernel):
    """Base of kernels for full rectangles, and for rectangles with a causal mask from the top left: column b <= row a.

    If a piece hides the keys before each query instead, it is computed with all tokens in reverse order: then it is
    causal.
    """

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Returns (out, lse)."""

    @abstractmethod
    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv)."""

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_band(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        if band[0] is None:
            return self.call_forward(q, k, v, band[1] is not None, scores.scale)
        out, lse = self.call_forward(q.flip(1), k.flip(1), v.flip(1), True, scores.scale)
        return out.flip(1), lse.flip(1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (dout, q, k, v, out, lse)
        if band[0] is None:
            return self.call_backward(tensors, band[1] is not None, scores.scale)
        dout, q, k, v, out, lse = (x.flip(1) for x in tensors)
        dq, dk, dv = self.call_backward((dout, q, k, v, out, lse), True, scores.scale)
        return dq.flip(1), dk.flip(1), dv.flip(1)


def cut_band(tile: Tile) -> tuple[Tile, ...]:
    """Cuts a trimmed tile into rectangles that are full, causal from the top left, or causal in reverse order."""
    low, high = tile.offsets
    if low is not None and high is not None:  # a window: bounded on both sides
        return _cut_strip(tile, low, high)
    if high:  # row 0 sees columns 0 .. high: all rows see the columns before `high`, the rest is causal
        return _split_columns(tile, tile.k0 + high)
    # The last row, T - 1, sees columns from T - 1 + low on: all rows see columns from T + low on.
    if low is not None and low != tile.k1 - tile.k0 - (tile.q1 - tile.q0):
        return _split_columns(tile, tile.k0 + tile.q1 - tile.q0 + low)
    return (tile,)


def _split_columns(tile: Tile, column: int) -> tuple[Tile, ...]:
    pieces = (tile.columns(tile.k0, column), tile.columns(column, tile.k1))
    return tuple(piece for piece in pieces if piece)


def _cut_strip(tile: Tile, low: int, high: int) -> tuple[Tile, ...]:
    """Cuts a band bounded on both sides by rows, then by columns, so that each piece has at most one bound."""
    pieces: list[Tile] = []
    for start in range(tile.q0, tile.q1, high - low + 1):  # a row sees high - low + 1 columns
        block = tile.rows(start, start + high - low + 1)
        if block is None:
            continue
        if None in block.offsets:
            pieces += cut_band(block)
        else:
            # A block is no taller than the band is wide. So before the first column of its last row only `low` hides
            # pairs, and from this column on only `high` does.
            for piece in _split_columns(block, block.q1 - 1 + (tile.low or 0)):
                pieces += cut_band(piece)
    return tuple(pieces)


# -- on the CPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuFlash(Batched, TopLeft):
    """torch's flash attention for the CPU (FlashAttention, arXiv 2205.14135), in any float dtype.

    The op takes [B, H, T, D], with the same head dim for q, k and v: narrower tensors are padded.
    """

    name: str = "cpu_flash"
    limits: ClassVar[Limits] = Limits(device="cpu")

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        dim = v.shape[3]
        # `transpose` gives the op [B, H, T, D] without a copy.
        q, k, v = (x.transpose(1, 2) for x in pad_head_dims(q, k, v))
        out, lse = _cpu_forward(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2)[..., :dim], lse.transpose(1, 2)

    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dims, lse = [x.shape[3] for x in tensors[1:4]], tensors[5]
        dout, q, k, v, out = (x.transpose(1, 2) for x in pad_head_dims(*tensors[:5]))
        grads = _cpu_backward(dout, q, k, v, out, lse.transpose(1, 2), 0.0, causal, scale=scale)
        dq, dk, dv = (x.transpose(1, 2)[..., :dim] for x, dim in zip(grads, dims, strict=True))
        return dq, dk, dv


# -- on CUDA ----------------------------------------------------------------------------------------------------------

CAUSAL = 1
"""The ops' code (`custom_mask_type`) for a causal mask from the top left. 0 is no mask."""
MAX_TOKENS = 2**16
"""Maximum number of queries and of keys of one call: with more, 32-bit offsets overflow (pytorch/pytorch issue
162588)."""
LSE_MULTIPLE = 32
"""The ops pad T in lse to a multiple of this. The padding is infinity, because exp(s - inf) = 0."""


@dataclass(frozen=True)
class Efficient(Batched, TopLeft):
    """torch's memory-efficient attention (arXiv 2112.05682, xFormers' kernels): also for float32, and for Dv != D.

    The ops take [B, T, H, D] with as many key heads as query heads, and return lse [B, H, T] in float32. T in lse is
    padded (`LSE_MULTIPLE`).
    """

    name: str = "efficient"
    limits: ClassVar[Limits] = Limits(
        device="cuda", dtypes=(*HALVES, torch.float32), head_dims=HeadDims(multiple=8), min_capability=(5, 0)
    )

    def refuses(self, inputs: Inputs) -> str | None:
        reason = self.limits.refuses(inputs)
        if reason is None and inputs.dtype == torch.bfloat16 and (inputs.capability or (8, 0)) < (8, 0):
            return "takes bfloat16 from compute capability 8.0 (Ampere) on"
        return reason

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        # By rows, then each part by columns: no piece has more than MAX_TOKENS of either.
        pieces = list[Tile]()
        for rows in _split(tile.rows, tile.q0, tile.q1):
            for block in _split(rows.columns, rows.k0, rows.k1):
                pieces += super().cut(block)
        return tuple(pieces)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _align_rows(q, _repeat_heads(k, q), _repeat_heads(v, q))
        options = (None, None, None, None, None, 0.0, CAUSAL * causal, True)  # no bias, lengths and dropout; with lse
        out, lse, *_ = _efficient_forward(q, k, v, *options, scale=scale)
        return out, lse[..., : q.shape[1]].transpose(1, 2)

    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        qkv = _align_rows(q, _repeat_heads(k, q), _repeat_heads(v, q))
        sizes = (None, None, q.shape[1], k.shape[1])
        # Backward reads lse in blocks of LSE_MULTIPLE rows.
        lse = pad(lse.transpose(1, 2), (0, -lse.shape[1] % LSE_MULTIPLE), value=torch.inf).contiguous()
        rng_state = torch.empty((), dtype=torch.int64, device=q.device)  # unused without dropout
        options = (0.0, rng_state, rng_state, CAUSAL * causal, False)
        dout, out = dout.contiguous(), out.contiguous()
        dq, dk, dv, _ = _efficient_backward(dout, *qkv, None, out, *sizes, lse, *options, scale=scale)
        return dq, _sum_head_groups(dk, k), _sum_head_groups(dv, v)


def _split(part: Callable[[int, int], Tile | None], start: int, stop: int) -> list[Tile]:
    """Returns the parts of a tile of at most `MAX_TOKENS` rows or columns, by `Tile.rows` or `Tile.columns`."""
    cuts = [part(first, min(first + MAX_TOKENS, stop)) for first in range(start, stop, MAX_TOKENS)]
    return [tile for tile in cuts if tile]


def _align_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    # The ops need rows that start at multiples of 16 bytes.
    return tuple(contiguous_rows(x, 16 // x.itemsize) for x in tensors)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[2] == q.shape[2] else repeat(x, "b s k d -> b s (k g) d", g=q.shape[2] // x.shape[2])


def _sum_head_groups(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape[2] == like.shape[2]:
        return grad
    # Sums each group of repeated heads, in float32 or wider.
    groups = rearrange(grad, "b s (k g) d -> b s k g d", k=like.shape[2])
    return groups.sum(3, dtype=accumulation_dtype(grad.dtype))
