"""One cell of the grid that every method walks: the queries of one shard against the keys of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from armillary.attention.kernels import Backward, Forward, Scores, in_rows
from armillary.attention.mask import Window
from armillary.attention.spec import Call, Saved, head_runs
from armillary.attention.tiling.merge import Merge, Part, Sum
from armillary.core import span


@dataclass(frozen=True)
class Cell:
    """Queries of shard `query` of `call.layout` against keys of shard `key` of `call.key_layout`.

    Of either shard, only what is seen may be at hand: `first_query` and `first_key` are the first tokens that are.
    """

    call: Call
    query: int
    key: int
    first_query: int = 0
    first_key: int = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, into: Merge) -> None:
        """Merges the cell's partial result into `into`. Nothing visible, nothing done."""
        calls, scores = tuple(self._kernel_calls()), self.call.scores
        q, k, v = (in_rows(x) for x in (turned(q, scores), k, v))
        pieces = (Forward(q[rows], k[columns], v[columns], band) for rows, columns, band in calls)
        with self._span("forward"):
            for i, partial in self.call.kernel.forward_many(pieces, scores.turned):
                into.add(calls[i][0], *partial)
                del partial  # so that the next one does not find it in memory

    def backward(self, dout: Tensor, saved: Saved, dq: Sum, dk: Sum, dv: Sum) -> None:
        """Adds the cell's share to dq, dk and dv; `saved` and dout [B, T, H, Dv] are of these queries and keys."""
        calls, scores, lse = tuple(self._kernel_calls()), self.call.scores, saved.lse
        dout, q, k, v, out = (in_rows(x) for x in (dout, turned(saved.q, scores), saved.k, saved.v, saved.out))
        pieces = (
            Backward(dout[rows], q[rows], k[columns], v[columns], out[rows], lse[rows], band)
            for rows, columns, band in calls
        )
        with self._span("backward"):
            for i, shares in self.call.kernel.backward_many(pieces, scores.turned):
                rows, columns, _ = calls[i]
                dq.add(rows, turned(shares[0], scores))
                dk.add(columns, shares[1])
                dv.add(columns, shares[2])
                del shares

    def _span(self, which: str) -> AbstractContextManager[object]:
        """Shows the cell in a trace, if one is open."""
        return span(f"{which} q{self.query} k{self.key}", query=self.query, key=self.key)

    def _kernel_calls(self) -> Iterator[tuple[Part, Part, Window]]:
        """(part of the queries, part of the keys, band) of each kernel call."""
        call, grid = self.call, self.call.grid
        first, first_key = self.first_query, self.first_key
        for row in grid.rows:
            rows = slice(row, row + 1) if call.mask.per_row else slice(None)
            for whole in grid.tiles(self.query, self.key, row):
                for tile in call.kernel.cut(whole):
                    for run in head_runs(call.key_heads):
                        yield (
                            (rows, slice(tile.q0 - first, tile.q1 - first), slice(run.q0, run.q1)),
                            (rows, slice(tile.k0 - first_key, tile.k1 - first_key), slice(run.k0, run.k1)),
                            tile.offsets,
                        )


def turned(x: Tensor, scores: Scores) -> Tensor:
    """q, or its gradient, for scores whose scale is above 0 (`Scores.turn`)."""
    return x if scores.turn == 1 else x * scores.turn
