"""Small kernel calls of one shape put together as one batch, for kernels that take no variable lengths.

Short documents, chunks and blocks make many tiles alike, and a call costs more than what they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.attention.kernels.kernel import Backward, Forward, Kernel, Scores
from armillary.attention.kernels.packing import ALONE, FULL


class Batched(Kernel):
    """Runs small pieces of the same shapes and band as rows of one batch."""

    def groups(self, pieces: Sequence[Forward] | Sequence[Backward]) -> Iterator[Sequence[int]]:
        alike = dict[tuple[Any, ...], list[int]]()
        for i, piece in enumerate(pieces):
            q, k = piece.q.shape, piece.k.shape
            tokens = q[0] * max(q[1], k[1])
            if tokens >= ALONE:
                yield (i,)
                continue
            group = alike.setdefault((q, k, piece.v.shape, piece.band), [])
            group.append(i)
            if len(group) * tokens >= FULL:
                yield group.copy()
                group.clear()
        yield from (group for group in alike.values() if group)

    def forward_packed(self, pieces: Sequence[Forward], scores: Scores) -> Iterable[tuple[Tensor, Tensor]]:
        q, k, v = (torch.cat(parts) for parts in list(zip(*pieces, strict=True))[:3])
        return _apart(self.forward(q, k, v, pieces[0].band, scores), pieces)

    def backward_packed(self, pieces: Sequence[Backward], scores: Scores) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        dout, q, k, v, out, lse = (torch.cat(parts) for parts in list(zip(*pieces, strict=True))[:6])
        return _apart(self.backward(dout, q, k, v, out, lse, pieces[0].band, scores), pieces)


def _apart(results: Sequence[Tensor], pieces: Sequence[Forward] | Sequence[Backward]) -> Any:
    """For each piece its part of the results; of no rows, where a rank has none of the batch."""
    sizes = [pieces[0].q.shape[0]] * len(pieces)
    return zip(*(x.split(sizes) for x in results), strict=True)
