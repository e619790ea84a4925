"""What a local kernel is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.attention.mask import Window
from armillary.attention.tiles import Tile


class Scores(NamedTuple):
    """From a dot product to a score: `scale * q k`, then, where there is a softcap c, `c * tanh(score / c)`."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Inputs:
    """All that a kernel may depend on when it says whether it can be used."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: float | None = None

    @classmethod
    def of(cls, q: Tensor, v: Tensor, softcap: float | None = None) -> Inputs:
        return cls(q.device.type, q.dtype, q.shape[-1], v.shape[-1], softcap)

    def __str__(self) -> str:
        cap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        return f"{self.dtype} on {self.device}, head dims {self.head_dim} (q, k) and {self.value_dim} (v){cap}"


class Kernel(Protocol):
    """Attention of one tile. Stateless; head h of `q` uses head h // (H / K) of `k` and `v`.

    Shapes: q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out and dout [B, T, H, Dv], lse [B, T, H] in the
    accumulation dtype (float32, float64 for float64). Each row of the tile sees at least one column.
    """

    @property
    def name(self) -> str: ...

    def refuses(self, inputs: Inputs) -> str | None:
        """Why these inputs are not for this kernel, or None if they are."""
        ...

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        """The tile in pieces that this kernel does in one call each: itself, if it knows bands."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        """(out, lse); row a sees column b iff band[0] <= b - a <= band[1]."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of (dq, dk, dv), given the out and lse over *all* keys, not just the tile's."""
        ...
