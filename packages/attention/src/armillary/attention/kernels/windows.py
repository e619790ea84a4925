"""Bands as the windows of FlashAttention's kernels, and the tiles for which those windows are not what they say.

The kernels count from the bottom right: of T rows and S columns, row a sees a + S - T - left .. a + S - T + right, -1
for a side that is unbounded. FlashAttention-2, torch's copy included, then rewrites them: a side of S or more becomes
unbounded, and an unbounded side beside a bounded one becomes S. Counted from the bottom right, S columns do not reach
from the top rows to the last column where T > S + 1: those rows would lose keys, and a right bound of S or more, which
still binds there, would be dropped. FlashAttention-3 has no such gap.
"""

from __future__ import annotations

from itertools import pairwise

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window


def window_of(band: Window, queries: int, keys: int) -> tuple[int, int]:
    """(left, right) for a trimmed tile of this many rows and columns: neither is negative where the band is bounded."""
    low, high = band
    corner = keys - queries
    return -1 if low is None else corner - low, -1 if high is None else high - corner


def cut_rows(tile: Tile) -> tuple[Tile, ...]:
    """The tile in pieces whose windows are exact: cut, where needed, at the rows where a bound begins or ends to bind.

    Row a is bound from below if low > -a, and from above if high < S - 1 - a. No piece of these has T > S + 1 and a
    bound.
    """
    low, high = tile.offsets
    queries, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    if _exact(window_of((low, high), queries, keys), queries, keys):
        return (tile,)
    ends = {tile.q0, tile.q1}
    ends |= set() if low is None else {tile.q0 + 1 - low}
    ends |= set() if high is None else {tile.q0 + keys - 1 - high}
    parts = (tile.rows(start, stop) for start, stop in pairwise(sorted(ends)))
    return tuple(part for part in parts if part)


def _exact(window: tuple[int, int], queries: int, keys: int) -> bool:
    left, right = window
    if right < 0:
        return left < 0 or queries <= keys + 1
    return right < keys
