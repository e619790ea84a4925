"""One block of the grid that every method walks: the queries of one shard against the keys of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from armillary.attention.kernels import Backward, Forward, Kernel, Scores, in_rows
from armillary.attention.mask import Window
from armillary.attention.tiling.grid import Grid
from armillary.attention.tiling.merge import ALL, Merge, Sum, TilePart
from armillary.core import span
from armillary.core.observe.trace import IDLE, Trace
from armillary.core.token_ranges import TokenRanges

KernelCall = tuple[TilePart, TilePart, Window]
"""TilePart of the queries, part of the keys, band."""


class HeadRun(NamedTuple):
    """Query heads q0..q1 over key/value heads k0..k1, the same number of query heads for each key/value head."""

    q0: int
    q1: int
    k0: int
    k1: int


class BlockAttention(NamedTuple):
    """Attention of some queries over some keys, as kernel calls that were found before.

    Args:
        query, key: the shards.
        scores: with a scale above 0.
        turn: what q, and then dq, is multiplied by for that (`Scores.turn`).
        calls: of `kernel`, each on parts of q and of k, v.
    """

    query: int
    key: int
    kernel: Kernel
    scores: Scores
    turn: int
    calls: tuple[KernelCall, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, into: Merge) -> None:
        """Merges the block's partial result into `into`. Nothing visible, nothing done."""
        q, k, v = in_rows(q if self.turn == 1 else q * self.turn), in_rows(k), in_rows(v)
        pieces = [Forward(rows.of(q), columns.of(k), columns.of(v), band) for rows, columns, band in self.calls]
        kernel, scores = self.kernel, self.scores
        with IDLE if Trace.current is None else self._span("forward"):
            for first, *others in kernel.groups(pieces):
                if others:
                    group = [first, *others]
                    packed = kernel.forward_packed([pieces[i] for i in group], scores)
                    for i, (out, lse) in zip(group, packed, strict=True):
                        into.add(self.calls[i][0], out, lse)
                else:
                    into.add(self.calls[first][0], *kernel.forward(*pieces[first], scores))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Sum, dk: Sum, dv: Sum
    ) -> None:
        """Adds the block's share to dq, dk and dv; out and lse are over all keys of these queries."""
        dout, q, k, v, out = (
            in_rows(dout),
            in_rows(q if self.turn == 1 else q * self.turn),
            in_rows(k),
            in_rows(v),
            in_rows(out),
        )
        pieces = [
            Backward(rows.of(dout), rows.of(q), columns.of(k), columns.of(v), rows.of(out), rows.of(lse), band)
            for rows, columns, band in self.calls
        ]
        kernel, scores = self.kernel, self.scores

        def add(i: int, *shares: Tensor) -> None:
            rows, columns, _ = self.calls[i]
            dq.add(rows, shares[0] if self.turn == 1 else shares[0] * self.turn)
            dk.add(columns, shares[1])
            dv.add(columns, shares[2])

        with IDLE if Trace.current is None else self._span("backward"):
            for first, *others in kernel.groups(pieces):
                if others:
                    group = [first, *others]
                    packed = kernel.backward_packed([pieces[i] for i in group], scores)
                    for i, shares in zip(group, packed, strict=True):
                        add(i, *shares)
                else:
                    add(first, *kernel.backward(*pieces[first], scores))

    def _span(self, name: str) -> AbstractContextManager[object]:
        return span(f"{name} q{self.query} k{self.key}", query=self.query, key=self.key)


def kernel_calls(
    grid: Grid,
    kernel: Kernel,
    heads: tuple[HeadRun, ...],
    query: int,
    key: int,
    queries: TokenRanges | None,
    keys: TokenRanges | None,
) -> Iterator[KernelCall]:
    """The calls for shard `query` of the queries and shard `key` of the keys.

    Args:
        queries, keys: the tokens of the shards that are at hand, packed; what is seen is among them. None: all.
    """
    tokens = (
        grid.layout.sizes[query] if queries is None else queries.count,
        grid.key_layout.sizes[key] if keys is None else keys.count,
    )
    for row in grid.rows:
        rows = slice(row, row + 1) if grid.mask.per_row else ALL
        for whole in grid.tiles(query, key, row):
            for tile in kernel.cut(whole):
                of_queries = _packed(tile.q0, tile.q1, queries, tokens[0])
                of_keys = _packed(tile.k0, tile.k1, keys, tokens[1])
                for run in heads:
                    query_heads = ALL if len(heads) == 1 else slice(run.q0, run.q1)
                    of_heads = slice(run.k0, run.k1)  # key heads that nobody uses may be at hand too
                    yield TilePart(rows, of_queries, query_heads), TilePart(rows, of_keys, of_heads), tile.offsets


def _packed(start: int, stop: int, held: TokenRanges | None, tokens: int) -> slice:
    """Where a tile's side is among so many tokens at hand: all of it is seen, so it lies in one run of them."""
    if stop - start == tokens:
        return ALL
    shift = 0 if held is None else held.index(start) - start
    return slice(start + shift, stop + shift)


@lru_cache(maxsize=256)
def head_runs(key_heads: tuple[int, ...]) -> tuple[HeadRun, ...]:
    """The fewest runs of equal groups, one kernel call each. A kernel shares heads evenly; a rank's may be uneven.

    Args:
        key_heads: for each query head at hand, the key/value head at hand that it uses.
    """
    runs: list[HeadRun] = []
    for key_head in sorted(set(key_heads)):
        q0 = key_heads.index(key_head)
        q1 = q0 + key_heads.count(key_head)
        if runs and _group(runs[-1]) == q1 - q0:
            runs[-1] = HeadRun(runs[-1].q0, q1, runs[-1].k0, key_head + 1)
        else:
            runs.append(HeadRun(q0, q1, key_head, key_head + 1))
    return tuple(runs)


def _group(run: HeadRun) -> int:
    return (run.q1 - run.q0) // (run.k1 - run.k0)
