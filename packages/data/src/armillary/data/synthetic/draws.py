"""Random numbers by place: any of them is had at once, without those before it.

A generator has to be run from the start of a row, on every rank. Here the number at a place is a hash of the key and
the place, so each rank draws only those that it needs, and all ranks draw the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from armillary.data.order import stable_hash

Ints = NDArray[np.int64]


def bits(key: str, places: Ints) -> NDArray[np.uint64]:
    """64 random bits for each of `places`: output number `place` of the splitmix64 generator that `key` starts."""
    x = places.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around in silence, as this hash wants it
    x += np.uint64(stable_hash(key))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def draw(key: str, places: Ints, n: int) -> Ints:
    """A number of 0..n-1 for each of `places`, uniform but for a bias of n / 2**64."""
    return (bits(key, places) % np.uint64(n)).astype(np.int64)


def distinct(key: str, n: int, count: int) -> Ints:
    """`count` different numbers of 0..n-1 in random order, every choice as likely; work is O(count), not O(n).

    Needs count <= n.
    """
    if 2 * count >= n:
        return np.argsort(bits(key, np.arange(n)), kind="stable")[:count]
    drawn = 2 * count
    while True:
        # Drawing one after the other and passing over those that came before.
        numbers = draw(key, np.arange(drawn), n)
        first = np.sort(np.unique(numbers, return_index=True)[1])
        if len(first) >= count:
            return numbers[first[:count]]
        drawn *= 2
