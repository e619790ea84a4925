"""torch's own CUDA flash attention (FlashAttention-2): any band in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.kernels.kernel import Inputs, Scores
from armillary.attention.mask import Window
from armillary.attention.tiles import Tile

_forward: Any = cast(Any, torch.ops.aten)._flash_attention_forward
_backward: Any = cast(Any, torch.ops.aten)._flash_attention_backward


@dataclass(frozen=True)
class CudaFlash:
    """float16 and bfloat16, head dims up to 256 in steps of 8."""

    name: str = "cuda_flash"

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.device != "cuda":
            return f"runs on CUDA, not on {inputs.device}"
        if inputs.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {inputs.dtype}"
        if inputs.head_dim != inputs.value_dim or inputs.head_dim > 256 or inputs.head_dim % 8:
            return "needs one head dim for q, k and v, at most 256 and a multiple of 8"
        return "has no softcap" if inputs.softcap is not None else None

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return (tile,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        window = _window(band, q, k)
        out, lse, *_ = _forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scores.scale, **window
        )
        return out, lse.transpose(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        window = _window(band, q, k)
        lse = lse.transpose(1, 2).contiguous()
        state = q.new_empty(2, dtype=torch.uint64)  # of dropout's random numbers; there is no dropout
        lengths = (None, None, q.shape[1], k.shape[1])
        return _backward(dout, q, k, v, out, lse, *lengths, 0.0, False, state, state, scale=scores.scale, **window)


def _window(band: Window, q: Tensor, k: Tensor) -> dict[str, int]:
    """The kernel counts from the bottom right: row a sees a + S - T - left .. a + S - T + right; -1: unbounded."""
    low, high = band
    corner = k.shape[1] - q.shape[1]
    return {
        "window_size_left": -1 if low is None else corner - low,
        "window_size_right": -1 if high is None else high - corner,
    }
