"""The kernel interface: attention of one tile, forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.limits import Limits
from armillary.attention.kernels.packing import Sequences
from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window
from armillary.core.validation import number

ALIGNMENT = 8
"""Number of 16-bit elements in 16 bytes, the unit of a GPU load: rows must start at multiples of it."""

BackwardTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(dout, q, k, v, out, lse)."""


class Scores(NamedTuple):
    """The score of a dot product q k: `scale * q k`, and with a softcap c `c * tanh(score / c)`.

    Kernels take positive scales only: they find the largest score before they scale it, and hide keys with -inf. For
    other scales the caller multiplies q, and then dq, by `sign` and passes the scores of `with_positive_scale`.
    """

    scale: float
    softcap: float | None = None

    @property
    def sign(self) -> int:
        """Sign of the scale: 1, -1 or 0."""
        return (self.scale > 0) - (self.scale < 0)

    @property
    def with_positive_scale(self) -> Scores:
        """The same scores for q multiplied by `sign`."""
        return self if self.scale > 0 else self._replace(scale=abs(self.scale) or 1.0)


class Kernel(Protocol):
    """Attention of one tile, without dropout. Stateless; head h of `q` uses head h // (H / K) of `k` and `v`.

    Shapes: q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out and dout [B, T, H, Dv], lse [B, T, H] in the
    accumulation dtype (float32, or float64 for float64). Every row of the tile sees at least one column. Tensors have
    `contiguous_rows`, and the scale is positive.

    A subclass must define `cut`, `forward` and `backward`.
    """

    name: str
    limits: ClassVar[Limits] = Limits()

    def refuses(self, inputs: Inputs) -> str | None:
        """Returns the reason why the kernel does not support these inputs, or None. Follows `limits` by default."""
        return self.limits.refuses(inputs)

    def drawback(self, inputs: Inputs) -> str | None:
        """Returns the reason why any other kernel should be preferred for these inputs, or None."""
        return None

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        """Cuts a tile into pieces of one kernel call each. A kernel that supports bands returns the tile itself."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns (out, lse); row a sees column b iff band[0] <= b - a <= band[1]."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tile's share of (dq, dk, dv), from out and lse over *all* keys, not only those of the tile."""
        ...


class PackingKernel(Kernel):
    """A kernel that computes several small pieces in one call."""

    @abstractmethod
    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        """Returns a key, equal for pieces that one call may compute together; None for a piece with its own call."""

    @abstractmethod
    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Computes `forward` of several sequences: q [queries, H, D], k and v [keys, K, ...], lse [queries, H]."""

    @abstractmethod
    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes `backward` of several sequences, shaped as in `forward_packed`."""


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError for a softcap that is not finite and positive."""
    if softcap is not None and not number("softcap", softcap, ", or None for no cap") > 0:
        raise ValueError(f"softcap {softcap} must be above 0, or None for no cap")


def contiguous_rows(x: Tensor, multiple: int = 1) -> Tensor:
    """Returns x [..., D], or a copy, with each row of D elements contiguous and apart from the other rows.

    Kernels read such tensors and allocate results with the same strides: no strided, expanded or overlapping rows.

    Args:
        multiple: every row starts at a multiple of this number of elements.
    """
    *outer, last = x.stride()
    rows_apart = last == 1 and min(outer) >= x.shape[-1]
    if rows_apart and (multiple == 1 or not any(start % multiple for start in (x.storage_offset(), *outer))):
        return x
    return x.clone(memory_format=torch.contiguous_format)
