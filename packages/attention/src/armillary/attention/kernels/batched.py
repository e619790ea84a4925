"""Small kernel calls of one shape as one batch, for kernels without variable lengths.

Short documents, chunks and blocks make many equal tiles, and the overhead of a call is larger than its computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.attention.kernels.kernel import Backward, Forward, Kernel, Scores
from armillary.attention.kernels.packing import MAX_PACKED_TOKENS, MIN_SINGLE_TOKENS


class Batched(Kernel):
    """Computes small pieces of the same shapes and band as rows of one batch."""

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[Sequence[int]]:
        equal_pieces = dict[tuple[Any, ...], list[int]]()
        for i, piece in enumerate(pieces):
            q, k = piece.q.shape, piece.k.shape
            tokens = q[0] * max(q[1], k[1])
            if tokens >= MIN_SINGLE_TOKENS:
                yield (i,)
                continue
            group = equal_pieces.setdefault((q, k, piece.v.shape, piece.band), [])
            group.append(i)
            if len(group) * tokens >= MAX_PACKED_TOKENS:
                yield group.copy()
                group.clear()
        yield from (group for group in equal_pieces.values() if group)

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterable[tuple[Tensor, Tensor]]:
        q, k, v = (torch.cat(tensors) for tensors in list(zip(*pieces, strict=True))[:3])
        return _split_batch(self.forward(q, k, v, pieces[0].band, scores), pieces)

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        dout, q, k, v, out, lse = (torch.cat(tensors) for tensors in list(zip(*pieces, strict=True))[:6])
        return _split_batch(self.backward(dout, q, k, v, out, lse, pieces[0].band, scores), pieces)


def _split_batch(results: Sequence[Tensor], pieces: Sequence[Forward] | Sequence[Backward]) -> Any:
    """Returns the results of each piece; with 0 rows where a rank has none of the batch."""
    sizes = [pieces[0].q.shape[0]] * len(pieces)
    return zip(*(x.split(sizes) for x in results), strict=True)
