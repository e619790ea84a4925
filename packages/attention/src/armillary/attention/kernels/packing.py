"""Small kernel calls packed into one: their tensors one after another, for kernels with variable lengths.

Documents make many small tiles, none of which keeps a GPU busy. Large tiles gain nothing and would cost a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.kernels.kernel import Backward, Forward
from armillary.attention.kernels.windows import window_of
from armillary.core import compat
from armillary.core.to_device import to_device

MIN_SINGLE_TOKENS = 4096
"""Pieces with this many tokens or more are calls of their own."""
MAX_PACKED_TOKENS = 65536
"""A pack with this many tokens takes no more pieces: bounds the memory of its copies."""


class Lengths(NamedTuple):
    """Boundaries of packed sequences, int32 [n + 1], and the longest length."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


@dataclass
class PackedCall:
    """Pieces, by index, of one call."""

    indices: list[int] = field(default_factory=list[int])
    tokens: int = 0


def group_pieces(pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[list[int]]:
    """Groups pieces, by index, that one call computes together: small ones with the same window and heads."""
    packs: dict[object, PackedCall] = {}
    for index, piece in enumerate(pieces):
        tokens = piece.q.shape[0] * max(piece.q.shape[1], piece.k.shape[1])
        if tokens >= MIN_SINGLE_TOKENS:
            yield [index]
            continue
        key = (piece_window(piece), piece.q.shape[2:], piece.k.shape[2:])
        # A window and a head count are arguments of the call, so all pieces of a pack share them.
        pack = packs.setdefault(key, PackedCall())
        pack.indices.append(index)
        pack.tokens += tokens
        if pack.tokens >= MAX_PACKED_TOKENS:
            yield packs.pop(key).indices
    yield from (pack.indices for pack in packs.values())


def piece_window(piece: Forward | Backward) -> tuple[int, int]:
    """Returns the (left, right) window of a piece."""
    return window_of(piece.band, piece.q.shape[1], piece.k.shape[1])


def packed_lengths(pieces: Sequence[Forward] | Sequence[Backward]) -> Lengths:
    """Returns the lengths of packed pieces, in which each row of a piece's batch is a sequence."""
    queries = tuple(piece.q.shape[1] for piece in pieces for _ in range(piece.q.shape[0]))
    keys = tuple(piece.k.shape[1] for piece in pieces for _ in range(piece.q.shape[0]))
    device = pieces[0].q.device
    return Lengths(_boundaries(queries, device), _boundaries(keys, device), max(queries), max(keys))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns [sum of b t, ...] from [b, t, ...] each."""
    return torch.cat([x.flatten(0, 1) for x in tensors])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of `pack`: returns [b, t, ...] each, with the batch and tokens of `like`."""
    parts = packed.split([x.shape[0] * x.shape[1] for x in like])
    return [part.unflatten(0, x.shape[:2]) for part, x in zip(parts, like, strict=True)]


def _boundaries(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths, copied to the device once for all layers, forward and backward, that pack alike."""
    # A fake tensor belongs to its mode and must not outlive it.
    return _copied_boundaries(counts, device) if compat.fakes_tensors() else _cached_boundaries(counts, device)


def _copied_boundaries(counts: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


_cached_boundaries = lru_cache(maxsize=256)(_copied_boundaries)
