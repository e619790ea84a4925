"""Orders that look random and are the same in every process and release: nothing here moves a global generator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
"""Numbers of documents, tokens or places."""


def stable_hash(key: bytes | str) -> int:
    """64 bits that depend on `key` alone, evenly spread; Python's own `hash` differs from process to process.

    File names that are not valid UTF-8 (surrogate escapes) are fine.
    """
    data = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def random_bits(key: str, places: Index) -> npt.NDArray[np.uint64]:
    """64 random bits for each of `places`: output number `place` of the splitmix64 generator that `key` starts.

    Any of them is had at once, without those before it.
    """
    x = places.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around in silence, as this hash wants it
    x += np.uint64(stable_hash(key))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def permutation(n: int, key: str) -> Index:
    """The numbers 0..n-1 in an order that depends on `n` and `key` alone: int64 [n]."""
    return np.argsort(random_bits(key, np.arange(n)), kind="stable")


def interleaved(place: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Who has a place in the order that mixes several sources by weight, and how often it had one before.

    Source s has its k-th turn (from 0) at time (k + 1/2) / weight s; places are turns by time. So of the first places,
    however many, each of up to three sources has its share to within one, and each of n sources to within n / 2; and
    any place is found without those before it.
    """
    time = (place - Fraction(len(weights), 2)) / sum(weights)
    turns = turns_until(time, weights)  # at most `place` of them, and few less
    while True:
        first = min(range(len(weights)), key=lambda s: ((turns[s] + Fraction(1, 2)) / weights[s], s))
        if sum(turns) == place:
            return first, turns[first]
        turns[first] += 1


def turns_until(time: Fraction, weights: Sequence[Fraction]) -> list[int]:
    """How many turns each source has had up to a time, that time included."""
    return [max(0, int(weight * time + Fraction(1, 2))) for weight in weights]
