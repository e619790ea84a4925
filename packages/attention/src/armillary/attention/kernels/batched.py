"""Many small tiles of one shape in one kernel call, as rows of a batch, for kernels without variable lengths.

Short documents, chunks and blocks make many equal tiles, and the overhead of a call is larger than its computation.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from armillary.attention.kernels.kernel import BackwardTensors, PackingKernel, Scores
from armillary.attention.kernels.packing import Sequences
from armillary.attention.mask import Window


class Batched(PackingKernel):
    """Base of kernels that compute small pieces with the same shape and band in one call, as rows of a batch."""

    def pack_key(self, queries: int, keys: int, band: Window) -> Hashable:
        return queries, keys, band

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _rows(sequences.queries, q)[0], *_rows(sequences.keys, k, v)
        out, lse = self.forward(q, k, v, sequences.band, scores)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def backward_packed(
        self, tensors: BackwardTensors, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        dout, q, out, lse = _rows(sequences.queries, dout, q, out, lse)
        k, v = _rows(sequences.keys, k, v)
        dq, dk, dv = self.backward(dout, q, k, v, out, lse, sequences.band, scores)
        return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)


def _rows(lengths: tuple[int, ...], *packed: Tensor) -> list[Tensor]:
    """Reshapes packed tensors of n sequences of t tokens into a batch: [n t, ...] -> [n, t, ...]."""
    return [x.unflatten(0, (len(lengths), lengths[0])) for x in packed]
