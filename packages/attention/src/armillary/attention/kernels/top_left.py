"""Kernels that know rectangles, and causal ones aligned at the top left: how bands become those."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from armillary.attention.kernels.kernel import Kernel, Scores
from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(dout, q, k, v, out, lse)."""


class TopLeft(Kernel):
    """Does full rectangles and causal ones aligned at the top left; other bands are cut into such pieces.

    A rectangle bounded from below is a causal one read backwards, so those are flipped.
    """

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse), shapes as of `Kernel`."""

    @abstractmethod
    def call_backward(self, tensors: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_band(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = flipped(band, q, k, v)
        out, lse = flipped(band, *self.call_forward(q, k, v, is_causal(band), scores.scale))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = flipped(band, dout, q, k, v, out, lse)
        saved = (dout, q, k, v, out, lse)
        dq, dk, dv = flipped(band, *self.call_backward(saved, is_causal(band), scores.scale))
        return dq, dk, dv


def is_causal(band: Window) -> bool:
    """Whether a piece's band is the causal one, read forwards or backwards."""
    return band != (None, None)


def flipped(band: Window, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors [B, T, ...] in the order of tokens that makes the band a causal one, or back."""
    return tensors if band[0] is None else tuple(x.flip(1) for x in tensors)


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
