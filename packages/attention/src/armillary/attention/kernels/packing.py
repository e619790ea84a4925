"""Many small kernel calls as one: their tokens one after another, for kernels with variable lengths.

Documents make many small tiles, none of which keeps a GPU busy. Large tiles gain nothing and would cost a copy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from armillary.attention.mask import Window
from armillary.core import compat, to_device

MIN_SINGLE_TOKENS = 4096
"""Pieces with this many tokens or more are calls of their own."""
MAX_PACKED_TOKENS = 65536
"""A pack with this many tokens takes no more pieces: bounds the memory of its copies."""


class Lengths(NamedTuple):
    """Boundaries of packed sequences, int32 [n + 1], and the longest length."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_queries: int
    longest_keys: int

    @property
    def by_name(self) -> dict[str, torch.Tensor | int]:
        """The lengths as keyword arguments of flash-attn's versions 3 and 4."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return dict(zip(names, self, strict=True))


class Sequences(NamedTuple):
    """The packed sequences of a kernel call: piece after piece, and in a piece row after row of the batch.

    Args:
        queries, keys: number of tokens of each sequence.
        band: band of the first tile. The other tiles' bands have the same `Kernel.pack_key`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    band: Window

    def lengths(self, device: torch.device) -> Lengths:
        """Returns them on a device. They are copied once for all layers, forward and backward, that pack alike."""
        longest = max(self.queries, default=0), max(self.keys, default=0)
        return Lengths(_boundaries(self.queries, device), _boundaries(self.keys, device), *longest)


def _boundaries(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # A fake tensor belongs to its mode and must not outlive it.
    return _copy_boundaries(counts, device) if compat.fakes_tensors() else _cached_boundaries(counts, device)


def _copy_boundaries(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    ends = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


_cached_boundaries = lru_cache(maxsize=256)(_copy_boundaries)
