"""torch's memory-efficient attention (arXiv 2112.05682, xFormers' kernels): also for float32, and for Dv != D."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from einops import rearrange, repeat
from torch import Tensor

from armillary.attention.kernels.batched import Batched
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.kernel import BackwardTensors, contiguous_rows
from armillary.attention.kernels.limits import HALVES, HeadDims, Limits
from armillary.attention.kernels.tile import Tile
from armillary.attention.kernels.top_left import TopLeft
from armillary.core import accumulation_dtype

_forward: Any = cast(Any, torch.ops.aten)._efficient_attention_forward
_backward: Any = cast(Any, torch.ops.aten)._efficient_attention_backward

CAUSAL = 1
"""The ops' code (`custom_mask_type`) for a causal mask from the top left. 0 is no mask."""
MAX_TOKENS = 2**16
"""Maximum number of queries and of keys of one call: with more, 32-bit offsets overflow (pytorch/pytorch issue
162588)."""
LSE_MULTIPLE = 32
"""The ops pad T in lse to a multiple of this. The padding is infinity, because exp(s - inf) = 0."""


@dataclass(frozen=True)
class Efficient(Batched, TopLeft):
    """torch's ops take [B, T, H, D] with as many key heads as query heads, and return lse [B, H, T] in float32.

    T in lse is padded (`LSE_MULTIPLE`).
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
        out, lse, *_ = _forward(q, k, v, None, None, None, None, None, 0.0, CAUSAL * causal, True, scale=scale)
        return out, lse[..., : q.shape[1]].transpose(1, 2)

    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        qkv = _align_rows(q, _repeat_heads(k, q), _repeat_heads(v, q))
        sizes = (None, None, q.shape[1], k.shape[1])
        # Backward reads lse in blocks of LSE_MULTIPLE rows.
        padding = (0, -lse.shape[1] % LSE_MULTIPLE)
        lse = torch.nn.functional.pad(lse.transpose(1, 2), padding, value=torch.inf).contiguous()
        rng_state = torch.empty((), dtype=torch.int64, device=q.device)  # unused without dropout
        options = (0.0, rng_state, rng_state, CAUSAL * causal, False)
        dq, dk, dv, _ = _backward(dout.contiguous(), *qkv, None, out.contiguous(), *sizes, lse, *options, scale=scale)
        return dq, _sum_head_groups(dk, k), _sum_head_groups(dv, v)


def _split(part: Callable[[int, int], Tile | None], start: int, stop: int) -> list[Tile]:
    """Returns the parts of a tile, of at most `MAX_TOKENS` rows or columns from start .. stop - 1 each.

    Args:
        part: `Tile.rows` or `Tile.columns` of the tile.
    """
    cuts = [part(first, min(first + MAX_TOKENS, stop)) for first in range(start, stop, MAX_TOKENS)]
    return [tile for tile in cuts if tile]


def _align_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors, copied if their rows do not start at multiples of 16 bytes."""
    return tuple(contiguous_rows(x, 16 // x.itemsize) for x in tensors)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeats the heads of k or v for each query head."""
    return x if x.shape[2] == q.shape[2] else repeat(x, "b s k d -> b s (k g) d", g=q.shape[2] // x.shape[2])


def _sum_head_groups(grad: Tensor, like: Tensor) -> Tensor:
    """Sums the gradient of repeated heads over each group, in float32 or wider."""
    if grad.shape[2] == like.shape[2]:
        return grad
    groups = rearrange(grad, "b s (k g) d -> b s k g d", k=like.shape[2])
    return groups.sum(3, dtype=accumulation_dtype(grad.dtype))
