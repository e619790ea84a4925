"""torch's flash attention for the CPU: a real flash kernel (FlashAttention, arXiv 2205.14135), in any float dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from armillary.attention.kernels.kernel import FLOATS, Inputs, Kernel, Scores, in_rows, refuses_dtype
from armillary.attention.mask import Window
from armillary.attention.tiling.tiles import Tile

_forward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_for_cpu
_backward: Any = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CpuFlash(Kernel):
    """Does full rectangles and causal ones aligned at the top left; other bands are cut into such pieces.

    A rectangle bounded from below is a causal one read backwards, so those are flipped.
    """

    name: str = "cpu_flash"

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.device != "cpu":
            return f"runs on the CPU, not on {inputs.device}"
        if inputs.softcap is not None:
            return "has no softcap"
        return refuses_dtype(inputs.dtype, FLOATS)

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_band(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        flip, dim = band[0] is not None, v.shape[3]
        q, k, v = (_heads_first(in_rows(x), flip) for x in _one_dim(q, k, v))
        out, lse = _forward(q, k, v, 0.0, band != (None, None), scale=scores.scale)
        return _tokens_first(out, flip)[..., :dim], _tokens_first(lse, flip)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        flip, dims = band[0] is not None, (q.shape[3], k.shape[3], v.shape[3])
        dout, q, k, v, out = (_heads_first(in_rows(x), flip) for x in _one_dim(dout, q, k, v, out))
        grads = _backward(dout, q, k, v, out, _heads_first(lse, flip), 0.0, band != (None, None), scale=scores.scale)
        dq, dk, dv = (_tokens_first(x, flip)[..., :dim] for x, dim in zip(grads, dims, strict=True))
        return dq, dk, dv


def cut_band(tile: Tile) -> tuple[Tile, ...]:
    """A trimmed tile as full rectangles, top-left causal ones, and those bounded from below at the bottom right."""
    low, high = tile.offsets
    if low is not None and high is not None:
        return _cut_strip(tile, low, high)
    if high:  # the columns before the diagonal's first are seen by every row
        return _both(tile, tile.k0 + high)
    if low is not None and low != tile.k1 - tile.k0 - (tile.q1 - tile.q0):  # those after the diagonal's last, likewise
        return _both(tile, tile.k0 + tile.q1 - tile.q0 + low)
    return (tile,)


def _both(tile: Tile, column: int) -> tuple[Tile, ...]:
    parts = (tile.columns(tile.k0, column), tile.columns(column, tile.k1))
    return tuple(part for part in parts if part)


def _cut_strip(tile: Tile, low: int, high: int) -> tuple[Tile, ...]:
    """Blocks of rows no taller than the band is wide, each cut where one bound hands over to the other."""
    pieces: list[Tile] = []
    for start in range(tile.q0, tile.q1, high - low + 1):
        block = tile.rows(start, start + high - low + 1)
        if block is None:
            continue
        if None in block.offsets:
            pieces += cut_band(block)
        else:
            for part in _both(block, block.q1 - 1 + (tile.low or 0)):
                pieces += cut_band(part)
    return tuple(pieces)


def _one_dim(*tensors: Tensor) -> list[Tensor]:
    """The tensors with one head dim: the kernel wants it so, and zeros change no score and no output."""
    dim = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == dim else pad(x, (0, dim - x.shape[3])) for x in tensors]


def _heads_first(x: Tensor, flip: bool) -> Tensor:
    x = x.transpose(1, 2)
    return x.flip(2) if flip else x


def _tokens_first(x: Tensor, flip: bool) -> Tensor:
    return (x.flip(2) if flip else x).transpose(1, 2)
