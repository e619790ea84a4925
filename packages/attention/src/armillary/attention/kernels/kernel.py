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
from armillary.core.parts import number

ALIGNMENT = 8
"""Number of 16-bit elements in 16 bytes, the unit of a GPU load. Rows must start at multiples of this number."""

BackwardTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(dout, q, k, v, out, lse)."""


class Scores(NamedTuple):
    """Scale and softcap of scores: s = scale * q k, and with a softcap c, c * tanh(s / c).

    Kernels take positive scales only, because they find the largest score before they scale it, and hide keys with
    -inf. For other scales the caller multiplies q by `sign`, calls the kernel with `with_positive_scale`, and
    multiplies dq by `sign`.
    """

    scale: float
    softcap: float | None = None

    @property
    def sign(self) -> int:
        """Sign of the scale: 1, -1 or 0."""
        return (self.scale > 0) - (self.scale < 0)

    @property
    def with_positive_scale(self) -> Scores:
        """Gives q multiplied by `sign` the scores that `self` gives q."""
        return self if self.scale > 0 else self._replace(scale=abs(self.scale) or 1.0)


class Kernel(Protocol):
    """Attention of one tile, without dropout. Stateless. Query head h uses key/value head h // (H / K).

    Shapes: q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out and dout [B, T, H, Dv], lse [B, T, H] in the
    accumulation dtype (float32, or float64 for float64). The caller guarantees that every query sees at least one key,
    that tensors have `contiguous_rows`, and that the scale is positive.

    A subclass must define `name`, `cut`, `forward` and `backward`.
    """

    name: str
    """Value of the argument `kernel` of a call that selects this kernel."""
    limits: ClassVar[Limits] = Limits()
    """The inputs that the kernel supports; by default all without softcap."""

    def refuses(self, inputs: Inputs) -> str | None:
        """Returns the reason why the kernel does not support these inputs; None if it does. By default by `limits`."""
        return self.limits.refuses(inputs)

    def drawback(self, inputs: Inputs) -> str | None:
        """Returns the reason to prefer every other kernel that supports these inputs; None if there is none."""
        return None

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        """Cuts a tile into pieces, one for each kernel call. A kernel that supports any band returns the whole tile."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of one piece. Query a sees key b iff band[0] <= b - a <= band[1]; None is no bound."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the piece's share of (dq, dk, dv). `out` and `lse` are over *all* keys, not only the piece's."""
        ...


class PackingKernel(Kernel):
    """A kernel that computes several small pieces in one call."""

    @abstractmethod
    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        """Returns a key that is equal for pieces that one call can compute; None for a piece that is not packed."""

    @abstractmethod
    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Computes `forward` of several pieces, whose tokens are packed on dim 0.

        Shapes: q [queries, H, D], k [keys, K, D], v [keys, K, Dv], out [queries, H, Dv], lse [queries, H].
        """

    @abstractmethod
    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes `backward` of several pieces, packed as in `forward_packed`."""


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError for a softcap that is not finite and positive."""
    if softcap is not None and not number("softcap", softcap, ", or None for no cap") > 0:
        raise ValueError(f"softcap {softcap} must be above 0, or None for no cap")


def contiguous_rows(x: Tensor, multiple: int = 1) -> Tensor:
    """Returns x [..., D] if its rows of D elements are contiguous and do not overlap, else a contiguous copy.

    Kernels need such rows, because they allocate results with the strides of their inputs.

    Args:
        multiple: also copies unless every row starts at a multiple of this number of elements.
    """
    *outer, last = x.stride()
    rows_apart = last == 1 and min(outer) >= x.shape[-1]  # an expanded dim has stride 0
    if rows_apart and (multiple == 1 or not any(start % multiple for start in (x.storage_offset(), *outer))):
        return x
    return x.clone(memory_format=torch.contiguous_format)
