"""`TopLeft`: base of kernels that only support full rectangles and causal masks aligned at the top left.

Any other band is cut into such pieces.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from armillary.attention.kernels.kernel import BackwardTensors, Kernel, Scores
from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window


class TopLeft(Kernel):
    """Base of kernels for full rectangles, and for rectangles with a causal mask from the top left: column b <= row a.

    If a piece hides the keys before each query instead, it is computed with all tokens in reverse order: then it is
    causal.
    """

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Returns (out, lse), with shapes as in `Kernel.forward`."""

    @abstractmethod
    def call_backward(self, tensors: BackwardTensors, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv), with shapes as in `Kernel.backward`."""

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
    """Returns True if a piece of `cut_band` is causal, in the given or in reverse order of tokens."""
    return band != (None, None)


def is_reversed(band: Window) -> bool:
    """Returns True if a piece of `cut_band` is causal in reverse order of tokens."""
    return band[0] is not None


def flip_tokens(band: Window, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Reverses the tokens of [B, T, ...] tensors if the band is causal in reverse order. A second call undoes it."""
    return tuple(x.flip(1) for x in tensors) if is_reversed(band) else tensors


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
    """Returns the parts of a tile before and from `column` on, without empty ones."""
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
