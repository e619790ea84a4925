"""Attention of one block: the queries of one shard over the keys of one shard, as a list of kernel calls.

Small calls are packed. The calls of a pack become one: their tokens are copied into one tensor, one kernel call
computes them, and one merge adds their results. So a block with thousands of documents launches few kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from armillary.attention.kernels import Kernel, PackingKernel, Scores, contiguous_rows
from armillary.attention.kernels.kernel import MAX_PACKED_TOKENS, MIN_SINGLE_TOKENS, Sequences
from armillary.attention.mask import Window
from armillary.attention.tiling.accumulators import WHOLE_DIM, Merge, PackedTokens, Sum, TilePart
from armillary.attention.tiling.grid import Grid
from armillary.attention.tiling.tiles import repeat_indices
from armillary.core import TokenRanges, Trace, span
from armillary.core.internal import NO_SPAN, compat


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


KernelCall = tuple[TilePart, TilePart, Window]
"""Part of the queries, part of the keys, and the visible band."""


class SingleCall(NamedTuple):
    """A kernel call on one part of the queries and one part of the keys."""

    queries: TilePart
    keys: TilePart
    band: Window


class PackedCall(NamedTuple):
    """A kernel call on several sequences of queries and keys. No token is in two of them."""

    queries: PackedTokens
    keys: PackedTokens
    sequences: Sequences
    kernel: PackingKernel

    def to(self, device: torch.device) -> PackedCall:
        """Returns the call with its indices on `device`."""
        return self._replace(queries=self.queries.to(device), keys=self.keys.to(device))


class Shards(NamedTuple):
    """Sizes of the tensors of a block: rows of the batch, and queries and keys of a row."""

    rows: int
    queries: int
    keys: int


Calls = tuple[SingleCall | PackedCall, ...]
"""The kernel calls of a block, with small ones packed."""
HOST = torch.device("cpu")


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


# -- kernel calls ------------------------------------------------------------------------------------------------------


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


class HeadRun(NamedTuple):
    """Query heads q0 .. q1 - 1, which use key/value heads k0 .. k1 - 1: each is used by equally many query heads."""

    q0: int
    q1: int
    k0: int
    k1: int


@lru_cache(maxsize=256)
def head_runs(key_heads: tuple[int, ...]) -> tuple[HeadRun, ...]:
    """Returns the fewest runs of heads in which equally many query heads use each key/value head.

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
            # Kernels require equal numbers. They differ if a head axis cuts a group: of 2 query heads per key/value
            # head, a rank with query heads 1, 2 and 3 has one of the first group and both of the second.
            runs.append(HeadRun(q0, q0 + group, key_head, key_head + 1))
    return tuple(runs)


# -- packs -------------------------------------------------------------------------------------------------------------


def pack_calls(calls: Sequence[KernelCall], kernel: Kernel, shards: Shards) -> tuple[SingleCall | PackedCall, ...]:
    """Returns the calls with small ones packed: those with equal `PackingKernel.pack_key` and equal heads.

    Their indices are on the host.
    """
    packs_in_order = list[list[int]]()  # for each pack, or single call, the indices of its calls
    open_packs = dict[Hashable, list[OpenPack]]()
    for index, (query_part, key_part, band) in enumerate(calls):
        rows, queries = query_part.ranges(shards.rows, shards.queries)
        _, keys = key_part.ranges(shards.rows, shards.keys)
        size = len(rows) * max(len(queries), len(keys))
        key = None
        if isinstance(kernel, PackingKernel) and size < MIN_SINGLE_TOKENS:
            key = kernel.pack_key(len(queries), len(keys), band)
        if key is None:
            packs_in_order.append([index])
            continue
        # From tokens of a row to tokens of the concatenated rows. A call is on one row or on all rows; of a call on all
        # rows the tokens of the first row are enough, because then every call is on all rows.
        row = 0 if len(rows) > 1 else rows.start
        queries = range(queries.start + row * shards.queries, queries.stop + row * shards.queries)
        keys = range(keys.start + row * shards.keys, keys.stop + row * shards.keys)
        heads = (query_part.heads.start, query_part.heads.stop, key_part.heads.start, key_part.heads.stop)
        packs = open_packs.setdefault((key, heads), [])
        # First fit: the first open pack of the same kind that shares no queries with this call, because one merge
        # writes all results of a pack, and no keys, because one addition writes all gradients; else a new pack.
        for pack in packs:
            query_index, key_index = _insertion_index(pack.queries, queries), _insertion_index(pack.keys, keys)
            if query_index is not None and key_index is not None:
                break
        else:
            packs.append(pack := OpenPack())
            packs_in_order.append(pack.call_indices)
            query_index = key_index = 0
        pack.call_indices.append(index)
        pack.queries.insert(query_index, queries)
        pack.keys.insert(key_index, keys)
        pack.size += size
        if pack.size >= MAX_PACKED_TOKENS:
            packs.remove(pack)
    return tuple(_call_of([calls[index] for index in indices], kernel, shards) for indices in packs_in_order)


@dataclass
class OpenPack:
    """A pack to which calls may still be added.

    Args:
        call_indices: indices of its calls in the list of all calls.
        size: sum over its calls of the number of queries or keys, whichever is larger.
        queries, keys: its tokens, as sorted ranges of indices in the concatenated rows of the batch.
    """

    call_indices: list[int] = field(default_factory=list[int])
    size: int = 0
    queries: list[range] = field(default_factory=list[range])
    keys: list[range] = field(default_factory=list[range])


def _insertion_index(ranges: list[range], tokens: range) -> int | None:
    """Returns the index at which to insert `tokens` into sorted disjoint ranges; None if they overlap one of these."""
    index = bisect_left(ranges, tokens.start, key=lambda run: run.start)
    overlaps_previous = index > 0 and ranges[index - 1].stop > tokens.start
    overlaps_next = index < len(ranges) and ranges[index].start < tokens.stop
    return None if overlaps_previous or overlaps_next else index


def _call_of(calls: Sequence[KernelCall], kernel: Kernel, shards: Shards) -> SingleCall | PackedCall:
    """Returns one call that computes all `calls`."""
    if len(calls) == 1 or not isinstance(kernel, PackingKernel):
        return SingleCall(*calls[0])
    queries, query_lengths = _packed_tokens([call[0] for call in calls], shards.rows, shards.queries)
    keys, key_lengths = _packed_tokens([call[1] for call in calls], shards.rows, shards.keys)
    return PackedCall(queries, keys, Sequences(query_lengths, key_lengths, calls[0][2]), kernel)


def _packed_tokens(parts: Sequence[TilePart], batch: int, tokens: int) -> tuple[PackedTokens, tuple[int, ...]]:
    """Returns the tokens of all parts, packed, and the number of tokens of each sequence: one per part and row."""
    runs = [
        (row * tokens + run.start, len(run))
        for part in parts
        for rows, run in [part.ranges(batch, tokens)]
        for row in rows
    ]
    start, count = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    run, number = repeat_indices(count)
    # Not `from_numpy`, which returns a real tensor even under a fake mode.
    return PackedTokens(torch.tensor(start[run] + number), parts[0].heads), tuple(count.tolist())
