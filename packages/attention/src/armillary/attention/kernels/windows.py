"""Bands as the windows of FlashAttention kernels. Tiles whose window would hide the wrong pairs are cut.

FlashAttention aligns a window at the bottom right: of T rows and S columns, row a sees columns a + S - T - left to
a + S - T + right, and -1 is an unbounded side. FlashAttention-2 and torch's copy of it change some windows:

- A side of S or more becomes unbounded. If T > S, a right side of S or more may still hide columns from the top rows.
- An unbounded side beside a bounded one becomes S. If T > S + 1, the top rows then lose columns that they see.

FlashAttention-3 does neither.
"""

from __future__ import annotations

from itertools import pairwise

from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window


def window_of(band: Window, queries: int, keys: int) -> tuple[int, int]:
    """Returns FlashAttention's (left, right) for the band of a trimmed tile; -1 is an unbounded side.

    A trimmed tile has low <= S - T <= high, so a bounded side is not negative.
    """
    low, high = band
    corner = keys - queries
    return -1 if low is None else corner - low, -1 if high is None else high - corner


def cut_rows(tile: Tile) -> tuple[Tile, ...]:
    """Cuts a tile by rows into pieces for which FlashAttention-2 keeps the window. Most tiles need no cut.

    The cuts are where a bound begins or ceases to hide columns: `low` hides some from row a if low > -a, `high` if
    high < S - 1 - a. After that, no piece with a bound has T > S + 1.
    """
    low, high = tile.offsets
    queries, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    left_width, right_width = window_of((low, high), queries, keys)
    # The two changes of the module's docstring: a right side of S or more, and a left side alone if T > S + 1.
    is_kept = right_width < keys if right_width >= 0 else left_width < 0 or queries <= keys + 1
    if is_kept:
        return (tile,)
    ends = {tile.q0, tile.q1}
    ends |= set() if low is None else {tile.q0 + 1 - low}
    ends |= set() if high is None else {tile.q0 + keys - 1 - high}
    pieces = (tile.rows(start, stop) for start, stop in pairwise(sorted(ends)))
    return tuple(piece for piece in pieces if piece)
