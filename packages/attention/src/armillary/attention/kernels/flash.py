"""What the FlashAttention kernels for CUDA share: torch's own, and versions 2, 3 and 4 of the flash-attn package."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from armillary.attention.kernels.kernel import ALIGNED, Backward, Forward, Kernel, Scores, in_rows
from armillary.attention.kernels.limits import HALVES, Dims, Limits
from armillary.attention.kernels.packing import Lengths, lengths, packed, packs, unpacked, window
from armillary.attention.kernels.tile import Tile
from armillary.attention.kernels.top_left import Saved
from armillary.attention.kernels.windows import cut_rows, window_of
from armillary.attention.mask import Window

FLASH = Limits(device="cuda", dtypes=HALVES, dims=Dims(most=256, multiple=8, equal=True), least=(8, 0))
"""What FlashAttention-2 takes."""
WITH_SOFTCAP = replace(FLASH, softcap=True)


class Flash(Kernel):
    """float16 and bfloat16, head dims up to 256 in steps of 8, nearly any band in one call, small pieces together.

    A subclass makes the call, of tensors [B, T, H, D], or, with `lengths`, of packed ones [tokens, H, D]. lse then has
    its heads first: [B, H, T], or [H, tokens].
    """

    limits: ClassVar[Limits] = FLASH

    @abstractmethod
    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""

    @abstractmethod
    def call_backward(
        self, tensors: Saved, window: tuple[int, int], scores: Scores, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), from (dout, q, k, v, out, lse)."""

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_rows(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = (in_rows(x, ALIGNED) for x in (q, k, v))
        out, lse = self.call_forward(q, k, v, window_of(band, q.shape[1], k.shape[1]), scores, None)
        return out, lse.mT

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (in_rows(x, ALIGNED) for x in (dout, q, k, v, out))
        tensors = (dout, q, k, v, out, lse.mT.contiguous())
        return self.call_backward(tensors, window_of(band, q.shape[1], k.shape[1]), scores, None)

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[list[int]]:
        return packs(pieces)

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterator[tuple[Tensor, Tensor]]:
        queries, keys, values, _ = zip(*pieces, strict=True)
        q, k, v = packed(queries), packed(keys), packed(values)
        out, lse = self.call_forward(q, k, v, window(pieces[0]), scores, lengths(pieces))
        return zip(unpacked(out, queries), unpacked(lse.mT, queries), strict=True)

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        douts, queries, keys, values, outs, lses, _ = zip(*pieces, strict=True)
        dout, q, k, v, out = packed(douts), packed(queries), packed(keys), packed(values), packed(outs)
        tensors = (dout, q, k, v, out, packed(lses).mT.contiguous())
        dq, dk, dv = self.call_backward(tensors, window(pieces[0]), scores, lengths(pieces))
        return zip(unpacked(dq, queries), unpacked(dk, keys), unpacked(dv, values), strict=True)
