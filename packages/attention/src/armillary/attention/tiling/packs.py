"""Packs of small kernel calls: which calls are packed together, and the indices of their tokens.

The calls of a pack become one: their tokens are copied into one tensor, one kernel call computes them, and one merge
adds their results. So a block with thousands of documents launches few kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from armillary.attention.kernels import Kernel, PackingKernel
from armillary.attention.kernels.packing import MAX_PACKED_TOKENS, MIN_SINGLE_TOKENS, Sequences
from armillary.attention.mask import Window
from armillary.attention.tiling.merge import PackedTokens, TilePart
from armillary.attention.tiling.spans import repeat_indices

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


class Shards(NamedTuple):
    """Sizes of the tensors of a block: rows of the batch, and queries and keys of a row."""

    rows: int
    queries: int
    keys: int


def pack_calls(calls: Sequence[KernelCall], kernel: Kernel, shards: Shards) -> tuple[SingleCall | PackedCall, ...]:
    """Returns the calls with small ones packed: those with equal `PackingKernel.pack_key` and equal heads.

    No query is in two calls of a pack, because one merge writes all their results. No key is, because one addition
    writes all their gradients. The packs are the same in each run. Their indices are on the host.
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
        queries = _shift(queries, 0 if len(rows) > 1 else rows.start * shards.queries)
        keys = _shift(keys, 0 if len(rows) > 1 else rows.start * shards.keys)
        heads = (query_part.heads.start, query_part.heads.stop, key_part.heads.start, key_part.heads.stop)
        packs = open_packs.setdefault((key, heads), [])
        # First fit: the first open pack of the same kind that shares no tokens with this call, else a new pack.
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


def _shift(tokens: range, offset: int) -> range:
    return range(tokens.start + offset, tokens.stop + offset)


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
