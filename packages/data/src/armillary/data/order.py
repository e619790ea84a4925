"""Orders that look random and are the same in every process: nothing here reads or moves a global generator."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stable_hash(key: str) -> int:
    """64 bits that depend on `key` alone; Python's own `hash` differs from process to process.

    Spread evenly over 0 to 2**64 - 1. File names that are not valid UTF-8 (surrogate escapes) are fine.
    """
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def permutation(n: int, key: str) -> Tensor:
    """The numbers 0..n-1 in an order that depends on `n` and `key` alone: a LongTensor [n]."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(stable_hash(key)))
