"""What a local kernel is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.limits import Limits
from armillary.attention.kernels.tile import Tile
from armillary.attention.mask import Window
from armillary.core.checked import number

ALIGNED = 8
"""Elements of 16 bits: kernels read 16 bytes at once, from where a row begins."""


class Scores(NamedTuple):
    """From a dot product to a score: `scale * q k`, then, where there is a softcap c, `c * tanh(score / c)`.

    Kernels take a scale above 0 only, for they look for the largest score before they scale it, and hide keys by
    -inf. `turn` is what q, and then dq, is to be multiplied by instead: with `turned` scores that gives the same.
    """

    scale: float
    softcap: float | None = None

    @property
    def turn(self) -> int:
        """The sign of the scale: 1, -1 or 0."""
        return (self.scale > 0) - (self.scale < 0)

    @property
    def turned(self) -> Scores:
        """The same with a scale above 0."""
        return self if self.scale > 0 else self._replace(scale=abs(self.scale) or 1.0)


class Forward(NamedTuple):
    """What one `Kernel.forward` takes, but for the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Window


class Backward(NamedTuple):
    """What one `Kernel.backward` takes, but for the scores."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    band: Window


class Kernel(Protocol):
    """Attention of one tile. Stateless; head h of `q` uses head h // (H / K) of `k` and `v`. There is no dropout.

    Shapes: q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], out and dout [B, T, H, Dv], lse [B, T, H] in the
    accumulation dtype (float32, float64 for float64). Each row of the tile sees at least one column. Head dims are
    contiguous and rows apart (`in_rows`), and scales above 0.

    Subclass it: `refuses`, `hesitates` and all after `backward` then need not be written.
    """

    name: str
    limits: ClassVar[Limits] = Limits()

    def refuses(self, inputs: Inputs) -> str | None:
        """Why these inputs are not for this kernel, or None if they are; by its `limits`, unless overridden."""
        return self.limits.refuses(inputs)

    def hesitates(self, inputs: Inputs) -> str | None:
        """Why any other kernel that takes these inputs should, or None: what is slow, though right."""
        return None

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

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterable[Sequence[int]]:
        """The pieces, by index, that go into one call together; in an order that is the same on every run.

        Each alone, unless overridden along with `forward_packed` and `backward_packed`.
        """
        return ((i,) for i in range(len(pieces)))

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterable[tuple[Tensor, Tensor]]:
        """`forward` of the pieces of a group."""
        return [self.forward(*piece, scores) for piece in pieces]

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """`backward` of the pieces of a group, likewise."""
        return [self.backward(*piece, scores) for piece in pieces]


def check_softcap(softcap: float | None) -> None:
    """Refuses what would divide by zero or infinity, or turn scores round."""
    if softcap is not None and not number("softcap", softcap, ", or None for no cap") > 0:
        raise ValueError(f"softcap {softcap} must be above 0, or None for no cap")


def in_rows(x: Tensor, multiple: int = 1) -> Tensor:
    """x [..., D] as kernels can read it, and lay out what they return like it: itself, or a copy.

    Each row of D elements is one run of memory, apart from the others: not strided, not expanded, not overlapping.

    Args:
        multiple: of elements, at which rows begin.
    """
    *outer, last = x.stride()
    apart = last == 1 and min(outer) >= x.shape[-1]
    if apart and (multiple == 1 or not any(start % multiple for start in (x.storage_offset(), *outer))):
        return x
    return x.clone(memory_format=torch.contiguous_format)
