"""Many small tiles in one call of a kernel with variable lengths, with their tokens one after another.

Documents make many small tiles, none of which keeps a GPU busy. Large tiles are not packed: they keep it busy already,
and packing copies their tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from armillary.attention.mask import Window
from armillary.core import to_device
from armillary.core.parts import compat

MIN_SINGLE_TOKENS = 4096
"""A piece with this many queries or keys, over all its rows, is not packed."""
MAX_PACKED_TOKENS = 65536
"""A pack with this many tokens takes no more pieces, which bounds the memory of the copies."""


class Lengths(NamedTuple):
    """Lengths of n packed sequences, as flash-attn takes them.

    Args:
        queries, keys: boundaries (cu_seqlens), int32 [n + 1].
        longest_queries, longest_keys: the largest length.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest_queries: int
    longest_keys: int

    @property
    def by_name(self) -> dict[str, torch.Tensor | int]:
        """The lengths as keyword arguments of flash-attn 3 and 4."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return dict(zip(names, self, strict=True))


class Sequences(NamedTuple):
    """The packed sequences of a kernel call. A sequence is one row of the batch of one piece.

    The order is piece after piece, and within a piece row after row.

    Args:
        queries, keys: number of queries and keys of each sequence.
        band: band of the first piece. Other bands may differ, but all pieces have the same `PackingKernel.pack_key`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    band: Window

    def lengths(self, device: torch.device) -> Lengths:
        """Returns the lengths on a device. They are cached, so that layers and backward do not copy them again."""
        longest = max(self.queries, default=0), max(self.keys, default=0)
        return Lengths(_boundaries(self.queries, device), _boundaries(self.keys, device), *longest)


def _boundaries(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # A fake tensor belongs to its mode and must not outlive it.
    return _copy_boundaries(counts, device) if compat.fakes_tensors() else _cached_boundaries(counts, device)


def _copy_boundaries(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    ends = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


_cached_boundaries = lru_cache(maxsize=256)(_copy_boundaries)
