"""Random numbers by place: any of them is had at once, without those before it.

A generator has to be run from the start of a row, on every rank. Here the number at a place is a hash of the key and
the place, so each rank draws only those that it needs, and all ranks draw the same.
"""

from __future__ import annotations

import numpy as np

from armillary.data.shuffle import Index, bits, permutation


def draw(key: str, places: Index, n: int) -> Index:
    """A number of 0..n-1 for each of `places`, uniform but for a bias of n / 2**64."""
    return (bits(key, places) % np.uint64(n)).astype(np.int64)


def distinct(key: str, n: int, count: int) -> Index:
    """`count` different numbers of 0..n-1 in random order, every choice as likely; work is O(count), not O(n).

    Needs count <= n.
    """
    if 2 * count >= n:
        return permutation(n, key)[:count]
    drawn = 2 * count
    while True:
        # Drawing one after the other and passing over those that came before.
        numbers = draw(key, np.arange(drawn), n)
        first = np.sort(np.unique(numbers, return_index=True)[1])
        if len(first) >= count:
            return numbers[first[:count]]
        drawn *= 2
