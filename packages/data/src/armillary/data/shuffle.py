"""Hashes, random numbers and permutations that are equal in every process and release.

They are functions of a key, so that each rank computes those it needs without a shared generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
"""Indices of documents, tokens or positions."""


def stable_hash(key: bytes | str) -> int:
    """Returns a 64-bit hash of `key` that is equal in every process, which Python's own `hash` is not.

    Surrogate escapes, as in file names that are not valid UTF-8, are accepted.
    """
    data = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def random_bits(key: str, indices: Index) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each index i, uint64: splitmix64's output at i steps after the hash of `key`.

    Each output is computed directly, without the earlier ones. The constants are those of Steele, Lea and Flood,
    "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
    """
    x = indices.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)  # uint64 arrays wrap around, as the generator requires
    x += np.uint64(stable_hash(key))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def permutation(n: int, key: str) -> Index:
    """Returns the integers 0..n-1 in random order: int64 [n], a function of `n` and `key`."""
    return np.argsort(random_bits(key, np.arange(n)), kind="stable")


def source_at(index: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Returns (source of item `index` of a weighted mixture of S sources, number of that source's earlier items).

    Item k of source s, counted from 0, has the sort key (k + 1/2) / weights[s], and the mixture has the items of all
    sources in the order of their keys. So the number of items of a source among the first n of the mixture differs from
    its proportion of n by at most 1 with up to three sources, and by at most S / 2 with more. Each index is computed
    directly, without the earlier ones.
    """
    # Source s has about weights[s] * key + 1/2 items with sort keys up to `key`. The sum of these numbers over all
    # sources is `index` for the key below. `items_until` rounds each number down, so the counts add up to at most
    # `index`; the loop adds the few items that are missing.
    key = (index - Fraction(len(weights), 2)) / sum(weights)
    counts = items_until(key, weights)
    while True:
        # The next item is from the source whose next item has the smallest key; of several, from the first source.
        source = min(range(len(weights)), key=lambda s: ((counts[s] + Fraction(1, 2)) / weights[s], s))
        if sum(counts) == index:
            return source, counts[source]
        counts[source] += 1


def items_until(last_key: Fraction, weights: Sequence[Fraction]) -> list[int]:
    """Returns the number of items of each source whose sort key, as in `source_at`, is at most `last_key`."""
    return [max(0, int(weight * last_key + Fraction(1, 2))) for weight in weights]
