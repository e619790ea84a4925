"""`Flash`: base of the FlashAttention kernels for CUDA, torch's own and versions 2, 3 and 4 of flash-attn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from armillary.attention.kernels.kernel import ALIGNMENT, BackwardTensors, PackingKernel, Scores, contiguous_rows
from armillary.attention.kernels.limits import HALVES, HeadDims, Limits
from armillary.attention.kernels.packing import Lengths, Sequences
from armillary.attention.kernels.tile import Tile
from armillary.attention.kernels.windows import cut_rows, window_of
from armillary.attention.mask import Window

FLASH = Limits(
    device="cuda", dtypes=HALVES, head_dims=HeadDims(largest=256, multiple=8, equal=True), min_capability=(8, 0)
)
"""Limits of torch's FlashAttention-2, from which the other versions' limits are derived."""
WITH_SOFTCAP = replace(FLASH, softcap=True)


class FlashCall(NamedTuple):
    """One call of a FlashAttention kernel.

    Args:
        window: (left, right), as in `window_of`.
        lengths: lengths of packed sequences; None if tensors are not packed.
    """

    window: tuple[int, int]
    scores: Scores
    lengths: Lengths | None = None


class Flash(PackingKernel):
    """Computes nearly any band in one call (see `windows.py`), and small pieces together in one call.

    A subclass calls the package's functions, on tensors [B, T, H, D] or, with `FlashCall.lengths`, on packed tensors
    [tokens, H, D]. These functions have heads before tokens in lse: [B, H, T] or [H, tokens].
    """

    limits: ClassVar[Limits] = FLASH

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        """Returns (out, lse)."""

    @abstractmethod
    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dq, dk, dv)."""

    def cut(self, tile: Tile) -> tuple[Tile, ...]:
        return cut_rows(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = (contiguous_rows(x, ALIGNMENT) for x in (q, k, v))
        out, lse = self.call_forward(q, k, v, FlashCall(window_of(band, q.shape[1], k.shape[1]), scores))
        return out, lse.mT

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (contiguous_rows(x, ALIGNMENT) for x in (dout, q, k, v, out))
        tensors = (dout, q, k, v, out, lse.mT.contiguous())  # lse [B, H, T]
        return self.call_backward(tensors, FlashCall(window_of(band, q.shape[1], k.shape[1]), scores))

    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        return window_of(band, queries, keys)  # one call has one window for all of its sequences

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        out, lse = self.call_forward(q, k, v, _packed_call(sequences, scores, q))
        return out, lse.mT

    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = tensors[5].mT.contiguous()  # [H, tokens]
        return self.call_backward((*tensors[:5], lse), _packed_call(sequences, scores, lse))


def _packed_call(sequences: Sequences, scores: Scores, x: Tensor) -> FlashCall:
    window = window_of(sequences.band, sequences.queries[0], sequences.keys[0])
    return FlashCall(window, scores, sequences.lengths(x.device))
