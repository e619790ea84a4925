"""Attention of one block: the queries of one shard over the keys of one shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.attention.kernels import Kernel, Scores, contiguous_rows
from armillary.attention.tiling.grid import Grid
from armillary.attention.tiling.merge import WHOLE_DIM, Merge, Sum, TilePart
from armillary.attention.tiling.packs import KernelCall, PackedCall, Shards, SingleCall, pack_calls
from armillary.core import TokenRanges, Trace, span
from armillary.core.parts import NO_SPAN, compat

Calls = tuple[SingleCall | PackedCall, ...]
"""The kernel calls of a block, with small ones packed."""
HOST = torch.device("cpu")


class HeadRun(NamedTuple):
    """Query heads q0 .. q1 - 1, which use key/value heads k0 .. k1 - 1: each is used by equally many query heads."""

    q0: int
    q1: int
    k0: int
    k1: int


class RingBlock(Protocol):
    """Attention of the queries and keys that a rank (or a node) has at one step of a ring."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, accumulator: Merge) -> None:
        """Merges the partial result into `accumulator`."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Sum, dk: Sum, dv: Sum
    ) -> None:
        """Adds the step's part of the gradients to dq, dk and dv; out and lse are those over all keys."""
        ...


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention of some queries over some keys, as a list of kernel calls.

    Args:
        query, key: indices of the query shard and of the key shard.
        kernel: computes the calls.
        scores: softmax scale and softcap. The scale is positive, as kernels require.
        sign: sign of the scale that the caller passed; q and dq are multiplied by it (`Scores.sign`).
        calls: one per tile and run of heads, each on a part of q and a part of k, v.
    """

    query: int
    key: int
    kernel: Kernel
    scores: Scores
    sign: int
    calls: tuple[KernelCall, ...]
    _packs: dict[tuple[Shards, torch.device], Calls] = field(
        default_factory=dict[tuple[Shards, torch.device], Calls], init=False, repr=False
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, accumulator: Merge) -> None:
        """Merges the partial result of the block into `accumulator`. Does nothing if no pair is visible."""
        if not self.calls or not q.shape[0]:  # a rank may have no row of the batch
            return
        q = contiguous_rows(q if self.sign == 1 else q * self.sign)
        k, v = contiguous_rows(k), contiguous_rows(v)
        kernel, scores = self.kernel, self.scores
        with NO_SPAN if Trace.current is None else self._span("forward"):
            for call in self._calls_on(q, k):
                rows, columns = call.queries, call.keys
                tensors = rows.of(q), columns.of(k), columns.of(v)
                if isinstance(call, SingleCall):
                    result = kernel.forward(*tensors, call.band, scores)
                else:
                    result = call.kernel.forward_packed(*tensors, call.sequences, scores)
                # Freed before the merge: the inputs of a packed call are copies. The result is freed before the next
                # call.
                del tensors
                accumulator.add(rows, *result)
                del result

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Sum, dk: Sum, dv: Sum
    ) -> None:
        """Adds the block's part of the gradients to dq, dk and dv; out and lse are those over all keys."""
        if not self.calls or not q.shape[0]:  # a rank may have no row of the batch
            return
        # Kernels require a positive scale. With s = sign |s|: s q k = |s| (sign q) k, so the kernel takes sign q, and
        # dq is sign times the gradient that it returns.
        q = contiguous_rows(q if self.sign == 1 else q * self.sign)
        dout, k, v, out = contiguous_rows(dout), contiguous_rows(k), contiguous_rows(v), contiguous_rows(out)
        kernel, scores = self.kernel, self.scores
        with NO_SPAN if Trace.current is None else self._span("backward"):
            for call in self._calls_on(q, k):
                rows, columns = call.queries, call.keys
                tensors = rows.of(dout), rows.of(q), columns.of(k), columns.of(v), rows.of(out), rows.of(lse)
                if isinstance(call, SingleCall):
                    grads = kernel.backward(*tensors, call.band, scores)
                else:
                    grads = call.kernel.backward_packed(tensors, call.sequences, scores)
                del tensors
                dq.add(rows, grads[0] if self.sign == 1 else grads[0] * self.sign)
                dk.add(columns, grads[1])
                dv.add(columns, grads[2])
                del grads

    def _calls_on(self, q: Tensor, k: Tensor) -> Calls:
        """Returns the calls for tensors of these sizes, with indices on the device. Copied there once, then cached."""
        shards = Shards(q.shape[0], q.shape[1], k.shape[1])
        if (calls := self._packs.get((shards, q.device))) is None:
            calls = self.packed_calls(shards)
            if q.device != HOST:
                calls = tuple([call if isinstance(call, SingleCall) else call.to(q.device) for call in calls])
                if not compat.fakes_tensors():
                    self._packs[shards, q.device] = calls
        return calls

    def packed_calls(self, shards: Shards) -> Calls:
        """Returns the calls for tensors of these sizes, small ones packed, with indices on the host. Cached."""
        if (calls := self._packs.get((shards, HOST))) is None:
            calls = pack_calls(self.calls, self.kernel, shards)
            if not compat.fakes_tensors():  # a fake tensor belongs to its mode and must not outlive it
                self._packs[shards, HOST] = calls
        return calls

    def _span(self, name: str) -> AbstractContextManager[object]:
        """Returns a context that records the block's computation in the trace."""
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
    """Yields the kernel calls of query shard `query` and key shard `key`.

    Args:
        heads: runs of heads (`head_runs`). There is one call per tile and run.
        queries, keys: the tokens of the shard that the packed tensors contain, among them all tokens in a visible pair.
            None if the tensors contain the full shard.
    """
    query_count = grid.layout.sizes[query] if queries is None else queries.count
    key_count = grid.key_layout.sizes[key] if keys is None else keys.count
    for row in grid.rows:
        rows = slice(row, row + 1) if grid.mask.per_row else WHOLE_DIM
        for block_tile in grid.tiles(query, key, row):
            for tile in kernel.cut(block_tile):  # into tiles that the kernel supports
                query_tokens = _packed_slice(tile.q0, tile.q1, queries, query_count)
                key_tokens = _packed_slice(tile.k0, tile.k1, keys, key_count)
                for run in heads:
                    query_heads = WHOLE_DIM if len(heads) == 1 else slice(run.q0, run.q1)
                    key_heads = slice(run.k0, run.k1)  # not `WHOLE_DIM`: there may be key heads that no query head uses
                    query_part = TilePart(rows, query_tokens, query_heads)
                    yield query_part, TilePart(rows, key_tokens, key_heads), tile.offsets


def _packed_slice(start: int, stop: int, packed: TokenRanges | None, count: int) -> slice:
    """Returns tokens start .. stop - 1 of a shard as a slice of the `count` tokens of a packed tensor."""
    # Every row and column of a tile is in a visible pair, so that all these tokens are packed, side by side.
    if stop - start == count:
        return WHOLE_DIM
    shift = 0 if packed is None else packed.index(start) - start
    return slice(start + shift, stop + shift)


@lru_cache(maxsize=256)
def head_runs(key_heads: tuple[int, ...]) -> tuple[HeadRun, ...]:
    """Returns the fewest runs of heads in which equally many query heads use each key/value head.

    Kernels require equal numbers, so each run is a kernel call of its own. The numbers may differ if a head axis
    divides the heads: with 2 query heads per key/value head, a rank with query heads 1, 2 and 3 uses one key/value head
    once and one twice.

    Args:
        key_heads: for each local query head, the local key/value head that it uses.
    """
    runs: list[HeadRun] = []
    for key_head in sorted(set(key_heads)):
        q0, group = key_heads.index(key_head), key_heads.count(key_head)
        last = runs[-1] if runs else None
        if last is not None and (last.q1 - last.q0) == group * (last.k1 - last.k0):
            runs[-1] = last._replace(q1=q0 + group, k1=key_head + 1)
        else:
            runs.append(HeadRun(q0, q0 + group, key_head, key_head + 1))
    return tuple(runs)
