"""Bands as the windows of FlashAttention kernels, and the tiles for which those windows are inexact.

A window counts from the bottom right: of T rows and S columns, row a sees columns a + S - T - left to
a + S - T + right, and -1 is an unbounded side. FlashAttention-2 and torch's copy rewrite windows: a side of S or more
becomes unbounded, and an unbounded side beside a bounded one becomes S. If T > S + 1, S columns from the bottom right
do not reach from the top rows to the last column, so those rows would lose keys; and a right side of S or more, which
still binds there, would be dropped. FlashAttention-3 has no such gap.
"""

from __future__ import annotations

from itertools import pairwise

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window


def window_of(band: Window, queries: int, keys: int) -> tuple[int, int]:
    """Returns (left, right) for a trimmed tile of this size. Neither is negative where the band is bounded."""
    low, high = band
    corner = keys - queries
    return -1 if low is None else corner - low, -1 if high is None else high - corner


def cut_rows(tile: Tile) -> tuple[Tile, ...]:
    """Cuts a tile into pieces whose windows are exact: at the rows where a bound starts or stops to bind, if needed.

    Row a is bounded from below if low > -a, and from above if high < S - 1 - a. No piece has T > S + 1 and a bound.
    """
    low, high = tile.offsets
    queries, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    left, right = window_of((low, high), queries, keys)
    exact = right < keys if right >= 0 else left < 0 or queries <= keys + 1
    if exact:
        return (tile,)
    # Rows at which a bound starts or stops to bind.
    ends = {tile.q0, tile.q1}
    ends |= set() if low is None else {tile.q0 + 1 - low}
    ends |= set() if high is None else {tile.q0 + keys - 1 - high}
    pieces = (tile.rows(start, stop) for start, stop in pairwise(sorted(ends)))
    return tuple(piece for piece in pieces if piece)
