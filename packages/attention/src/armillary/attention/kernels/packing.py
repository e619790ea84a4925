"""Small kernel calls put together: their tensors one after another, as a variable-length kernel takes them.

Documents make many small tiles, none of which keeps a GPU busy. Large ones gain nothing and would cost a copy.
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

ALONE = 4096
"""Tokens from which a piece is a call of its own."""
FULL = 65536
"""Tokens from which nothing more is added to a pack: what bounds the memory of its copies."""


class Lengths(NamedTuple):
    """Where each packed sequence begins and ends, int32 [n + 1], and how long the longest is."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass
class PackedCall:
    """Pieces, by index, for one call."""

    indices: list[int] = field(default_factory=list[int])
    tokens: int = 0

    def add(self, index: int, tokens: int) -> None:
        self.indices.append(index)
        self.tokens += tokens


def packs(pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[list[int]]:
    """The pieces, by index, that go into one call together: small ones of one window and the same heads."""
    growing: dict[object, PackedCall] = {}
    for index, piece in enumerate(pieces):
        tokens = piece.q.shape[0] * max(piece.q.shape[1], piece.k.shape[1])
        if tokens >= ALONE:
            yield [index]
            continue
        key = (window(piece), piece.q.shape[2:], piece.k.shape[2:])
        growing.setdefault(key, PackedCall()).add(index, tokens)
        if growing[key].tokens >= FULL:
            yield growing.pop(key).indices
    yield from (pack.indices for pack in growing.values())


def window(piece: Forward | Backward) -> tuple[int, int]:
    """(left, right) of a piece."""
    return window_of(piece.band, piece.q.shape[1], piece.k.shape[1])


def lengths(pieces: Sequence[Forward] | Sequence[Backward]) -> Lengths:
    """Of the packed pieces: each row of a piece's batch is a sequence."""
    queries = tuple(piece.q.shape[1] for piece in pieces for _ in range(piece.q.shape[0]))
    keys = tuple(piece.k.shape[1] for piece in pieces for _ in range(piece.q.shape[0]))
    device = pieces[0].q.device
    return Lengths(_ends(queries, device), _ends(keys, device), max(queries), max(keys))


def packed(parts: Sequence[Tensor]) -> Tensor:
    """[sum of b t, ...], from a list of [b, t, ...]."""
    return torch.cat([part.flatten(0, 1) for part in parts])


def unpacked(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `packed`: parts [b, t, ...] with the batch and tokens of `like`."""
    parts = whole.split([x.shape[0] * x.shape[1] for x in like])
    return [part.unflatten(0, x.shape[:2]) for part, x in zip(parts, like, strict=True)]


def _ends(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once for all layers, forward and backward, that pack alike; fake tensors belong to their mode."""
    return _sent(counts, device) if compat.fakes_tensors() else _kept(counts, device)


def _sent(counts: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return to_device(ends, device)


_kept = lru_cache(maxsize=256)(_sent)
