"""Random orders that are equal in every process and release. No global generator is used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
"""Numbers of documents, tokens or positions."""


def stable_hash(key: bytes | str) -> int:
    """Returns 64 bits that depend on `key` alone; Python's own `hash` differs between processes.

    File names that are not valid UTF-8 (surrogate escapes) are accepted.
    """
    data = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def random_bits(key: str, places: Index) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each of `places`: that output of the splitmix64 generator seeded by `key`.

    Any output is computed by itself, without the earlier ones.
    """
    x = places.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)  # uint64 arrays wrap around, as the generator requires
    x += np.uint64(stable_hash(key))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def permutation(n: int, key: str) -> Index:
    """Returns the numbers 0..n-1 in random order: int64 [n], a function of `n` and `key`."""
    return np.argsort(random_bits(key, np.arange(n)), kind="stable")


def interleaved(place: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Returns the source at a place of a weighted mixture, and the number of its earlier turns.

    Source s takes its k-th turn (from 0) at time (k + 1/2) / weight s, and places are turns sorted by time. So among
    the first places, each of up to three sources has its share to within one, and each of n sources to within n / 2.
    Any place is computed without the earlier ones.
    """
    time = (place - Fraction(len(weights), 2)) / sum(weights)
    turns = turns_until(time, weights)  # together at most `place`, and only a few fewer
    while True:
        first = min(range(len(weights)), key=lambda s: ((turns[s] + Fraction(1, 2)) / weights[s], s))
        if sum(turns) == place:
            return first, turns[first]
        turns[first] += 1


def turns_until(time: Fraction, weights: Sequence[Fraction]) -> list[int]:
    """Returns the number of turns of each source up to and including a time."""
    return [max(0, int(weight * time + Fraction(1, 2))) for weight in weights]
