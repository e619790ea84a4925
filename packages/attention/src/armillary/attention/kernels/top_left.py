"""Kernels that support only rectangles and causal squares aligned at the top left: other bands are cut into those."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from armillary.attention.kernels.kernel import BackwardTensors, Kernel, Scores
from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window


class TopLeft(Kernel):
    """Base of kernels for full rectangles and for causal ones aligned at the top left.

    A band that is bounded from below is causal if the order of tokens is reversed, so its tokens are flipped.
    """

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Returns (out, lse), shaped as by `Kernel.forward`."""

    @abstractmethod
    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv)."""

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_band(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = flip_tokens(band, q, k, v)
        out, lse = flip_tokens(band, *self.call_forward(q, k, v, is_causal(band), scores.scale))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = flip_tokens(band, dout, q, k, v, out, lse)
        tensors = (dout, q, k, v, out, lse)
        dq, dk, dv = flip_tokens(band, *self.call_backward(tensors, is_causal(band), scores.scale))
        return dq, dk, dv


def is_causal(band: Window) -> bool:
    """Returns True if a piece of `cut_band` is causal, in forward or in reverse order."""
    return band != (None, None)


def is_reversed(band: Window) -> bool:
    """Returns True if a piece of `cut_band` is causal in reverse order."""
    return band[0] is not None


def flip_tokens(band: Window, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Reverses the tokens of [B, T, ...] tensors where that makes the band causal. Its own inverse."""
    return tuple(x.flip(1) for x in tensors) if is_reversed(band) else tensors


def cut_band(tile: Tile) -> tuple[Tile, ...]:
    """Cuts a trimmed tile into rectangles that are full, causal from the top left, or the reverse of that."""
    low, high = tile.offsets
    if low is not None and high is not None:  # a window: bounded on both sides
        return _cut_strip(tile, low, high)
    if high:  # all rows see the columns before the one where the diagonal starts
        return _split_columns(tile, tile.k0 + high)
    # All rows see the columns after the one where the lower bound's diagonal ends.
    if low is not None and low != tile.k1 - tile.k0 - (tile.q1 - tile.q0):
        return _split_columns(tile, tile.k0 + tile.q1 - tile.q0 + low)
    return (tile,)


def _split_columns(tile: Tile, column: int) -> tuple[Tile, ...]:
    pieces = (tile.columns(tile.k0, column), tile.columns(column, tile.k1))
    return tuple(piece for piece in pieces if piece)


def _cut_strip(tile: Tile, low: int, high: int) -> tuple[Tile, ...]:
    """Cuts a band bounded on both sides into blocks of rows no taller than the band is wide, and those by columns."""
    pieces: list[Tile] = []
    for start in range(tile.q0, tile.q1, high - low + 1):
        block = tile.rows(start, start + high - low + 1)
        if block is None:
            continue
        if None in block.offsets:
            pieces += cut_band(block)
        else:  # only the lower bound hides keys before the first key of the last row, only the upper bound later ones
            for piece in _split_columns(block, block.q1 - 1 + (tile.low or 0)):
                pieces += cut_band(piece)
    return tuple(pieces)
