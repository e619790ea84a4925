"""`Tile`, the work of one kernel call: a rectangle of queries and keys of two shards, and its visible band."""

from __future__ import annotations

from typing import NamedTuple

from armillary.attention.mask import Window
from armillary.core.parts import count_pairs, slice_array


class Tile(NamedTuple):
    """Rows (queries) q0 .. q1 - 1 and columns (keys) k0 .. k1 - 1; row a sees column b iff low <= b - a <= high.

    Indices are local to the shards of queries and keys. None is no bound. A trimmed tile (`trim`) is canonical: every
    row and column has a visible pair, and a bound that excludes no pair is None.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None = None
    high: int | None = None

    @property
    def offsets(self) -> Window:
        """(low, high) if rows are counted from q0 and columns from k0."""
        shift = self.k0 - self.q0
        return None if self.low is None else self.low - shift, None if self.high is None else self.high - shift

    @property
    def area(self) -> int:
        """Number of visible pairs."""
        return count_pairs(slice_array([self]))

    def rows(self, start: int, stop: int) -> Tile | None:
        """Returns the part in rows start .. stop - 1, trimmed; None if it has no visible pair."""
        return self._replace(q0=max(self.q0, start), q1=min(self.q1, stop)).trim()

    def columns(self, start: int, stop: int) -> Tile | None:
        """Returns the part in columns start .. stop - 1, trimmed; None if it has no visible pair."""
        return self._replace(k0=max(self.k0, start), k1=min(self.k1, stop)).trim()

    def trim(self) -> Tile | None:
        """Returns the canonical tile with the same visible pairs; None if there are none."""
        q0, q1, k0, k1, low, high = self
        if low is not None and high is not None and low > high:
            return None
        # Drops rows that see no column: row a sees a + low .. a + high. Then drops columns that no remaining row sees.
        q0, q1 = q0 if high is None else max(q0, k0 - high), q1 if low is None else min(q1, k1 - low)
        k0, k1 = k0 if low is None else max(k0, q0 + low), k1 if high is None else min(k1, q1 + high)
        if q0 >= q1 or k0 >= k1:
            return None
        # A bound binds only if it hides a corner: the last row's first column, or the first row's last column.
        low = None if low is None or low <= k0 - (q1 - 1) else low
        high = None if high is None or high >= (k1 - 1) - q0 else high
        return Tile(q0, q1, k0, k1, low, high)
