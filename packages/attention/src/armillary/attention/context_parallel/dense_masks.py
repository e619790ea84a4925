"""Conversion of dense `attn_mask` tensors to `AttentionMask`, which has a few slices instead of N^2 values.

The visible keys of a query form runs of consecutive keys. Runs of consecutive queries are one slice if each end of the
run either stays or moves by one key from query to query. A mask that only has causality, a window and documents is
recognized first, because such masks have the cheapest kernels and layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from armillary.attention.context_parallel.communication import TensorCache, find_axes, gather_integers
from armillary.attention.mask import AttentionMask, Slice
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.internal import compat

Integers = npt.NDArray[np.int64]

MAX_SLICES = 2**14
"""Maximum number of slices for a row of the batch. A mask with more is an error: it would take as many kernel calls."""

REMEDY = (
    "give a mask of the whole sequence, bool or of 0 and -inf, [N, N], [1 or B, 1, N, N] or with 1 in place of N, or "
    "an AttentionMask: `cp.shard(ids, mask=...)`, `with sequence(layout=..., mask=...)`"
)


class MaskReader:
    """Converts each tensor once for all layers and steps that use it, and compares the result between ranks."""

    def __init__(self, method: Method) -> None:
        self.method, self.cache = method, TensorCache()

    def read(self, attn_mask: Tensor, batch: int, layout: SequenceLayout) -> AttentionMask:
        """Converts an `attn_mask`. Every rank must call this.

        For a new tensor, ranks exchange a hash of the mask or that it is invalid, if the method's axes are known.

        Raises:
            ValueError: as `mask_of_tensor`, or ranks hold different masks. If the axes are known, every rank raises.
        """
        return self.cache.get(attn_mask, (batch, layout.length), lambda: self._convert(attn_mask, batch, layout.length))

    def _convert(self, attn_mask: Tensor, batch: int, length: int) -> AttentionMask:
        mask, reason = None, ""
        try:
            mask = mask_of_tensor(attn_mask, batch, length)
        except ValueError as error:
            reason = str(error)
        if find_axes(self.method) is not None:
            # An error of one rank must raise on all of them, or the others would wait in attention.
            hashes = gather_integers([[int(mask is not None), 0 if mask is None else hash(mask)]], self.method)
            if not reason and not all(readable for readable, _ in hashes):
                reason = f"attn_mask of another rank is no mask of the whole sequence; {REMEDY}"
            elif not reason and any(rank_hash != hashes[0] for rank_hash in hashes):
                reason = f"ranks of one sequence were given different values of attn_mask; {REMEDY}"
        if mask is None or reason:
            raise ValueError(reason)
        return mask


def mask_of_tensor(attn_mask: Tensor, batch: int, length: int) -> AttentionMask:
    """Returns an `attn_mask` as an `AttentionMask` with the same visible pairs. Reads all N^2 values.

    Args:
        attn_mask: mask of the whole sequence, not of this rank's tokens; 2 to 4 dims that broadcast to [B, H, N, N].

    Raises:
        ValueError: a DTensor; a mask of a shard, one that differs between heads, another number of rows, an integer
            dtype, a bias, a query for which all keys have the dtype's lowest number, or more than MAX_SLICES slices.
    """
    rows = [_mask_of_row(row) for row in _visibility(attn_mask, batch, length)]
    return rows[0] if all(row == rows[0] for row in rows) else AttentionMask.rows(rows)


def _visibility(attn_mask: Tensor, batch: int, length: int) -> npt.NDArray[np.bool_]:
    """Returns bool [1 or B, N, N]: True if query i sees key j."""
    shape = tuple(attn_mask.shape)
    if attn_mask.requires_grad:
        raise ValueError(f"attn_mask {shape} requires a gradient: it is a bias; {REMEDY}")
    if compat.is_dtensor(attn_mask):
        raise ValueError(f"attn_mask {shape} is a DTensor; {REMEDY}")
    if attn_mask.ndim < 2 or attn_mask.ndim > 4 or not set(shape[-2:]) <= {1, length}:
        raise ValueError(
            f"attn_mask {shape} is not of the whole sequence of {length} tokens, so visibility on other ranks is "
            f"unknown; {REMEDY}"
        )
    four_dims = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if four_dims.shape[1] > 1:
        if not bool((four_dims == four_dims[:, :1]).all()):
            raise ValueError(f"attn_mask {shape} differs between heads; {REMEDY}")
        four_dims = four_dims[:, :1]
    if four_dims.shape[0] not in (1, batch):
        raise ValueError(f"attn_mask {shape} has {four_dims.shape[0]} rows; the batch has {batch}; {REMEDY}")
    row_mask = four_dims[:, 0]
    if row_mask.dtype == torch.bool:
        visible = row_mask
    elif not row_mask.is_floating_point():
        raise ValueError(f"attn_mask is {row_mask.dtype}; {REMEDY}")
    else:
        # Many models write the dtype's lowest number instead of -inf. Softmax gives it weight 0 if the query sees any
        # key.
        visible, lowest = row_mask == 0, torch.finfo(row_mask.dtype).min
        bias = ~visible & (row_mask != -torch.inf) & (row_mask != lowest)
        if bool(bias.any()):
            raise ValueError(f"attn_mask {shape} is a bias: it has {float(row_mask[bias][0]):.4g}; {REMEDY}")
        if bool((~visible.any(-1) & (row_mask == lowest).any(-1)).any()):
            raise ValueError(
                f"attn_mask {shape} has {lowest:.4g} for every key of a query, which then sees them all alike: -inf "
                f"would hide them; {REMEDY}"
            )
    return visible.expand(-1, length, length).cpu().numpy()


class _Runs(NamedTuple):
    """Runs of visible keys of all queries: run r is keys starts[r] .. ends[r] - 1.

    Args:
        first: index r of each query's first run, and at last the number of runs, [N + 1].
    """

    first: Integers
    starts: Integers
    ends: Integers


def _mask_of_row(visible: npt.NDArray[np.bool_]) -> AttentionMask:
    # A run begins where hidden changes to visible, and ends where visible changes to hidden. A hidden column is added
    # on each side, so that runs at the first and last key have both changes.
    padded = np.zeros((len(visible), visible.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = visible
    changes = np.diff(padded, axis=1)
    queries, starts = np.nonzero(changes == 1)
    ends = np.nonzero(changes == -1)[1]
    runs = _Runs(np.searchsorted(queries, np.arange(len(visible) + 1)), starts, ends)
    banded_mask = _banded_mask(runs, len(visible))
    return AttentionMask.of_slices(_slices(runs, len(visible))) if banded_mask is None else banded_mask


def _banded_mask(runs: _Runs, length: int) -> AttentionMask | None:
    """Returns a mask of causality, a window and documents, if these describe the runs exactly."""
    if (np.diff(runs.first) != 1).any():  # causal, window and documents give each query one run of keys
        return None
    queries, starts, ends = np.arange(length), runs.starts, runs.ends
    # A document begins at query i if no earlier query sees keys from i on, and no query from i on sees keys before i.
    end_before = np.append(0, np.maximum.accumulate(ends)[:-1])  # largest run end over the queries before i
    earliest_start = np.minimum.accumulate(starts[::-1])[::-1]  # smallest run start over the queries from i on
    document_starts = np.flatnonzero((end_before <= queries) & (earliest_start >= queries))
    boundaries = np.append(document_starts, length)
    document = np.searchsorted(document_starts, queries, side="right") - 1
    low, high = boundaries[document], boundaries[document + 1]
    # If there is a window, its sides are the most keys that any query sees before and after itself.
    left, right = int((queries - starts).max()), int((ends - 1 - queries).max())
    if left < 0 or right < 0:  # every query sees only later keys, or only earlier ones: no window has such a side
        return None
    # Without a window, every run reaches the edge of its document. With one, runs end there or at the window's edge.
    before = None if (starts == low).all() else left
    after = None if (ends == high).all() else right
    if before is not None and not (starts == np.maximum(low, queries - before)).all():
        return None
    if after is not None and not (ends == np.minimum(high, queries + after + 1)).all():
        return None
    documents = boundaries.tolist() if len(document_starts) > 1 else None
    causal = right == 0
    window = (before, None if causal else after)
    return AttentionMask(causal, None if window == (None, None) else window, documents)


def _slices(runs: _Runs, length: int) -> list[Slice]:
    """Cuts the queries into groups of consecutive ones, and returns a slice for each run of each group."""
    slices: list[Slice] = []
    first = 0
    counts = np.diff(runs.first)
    while first < length:
        # All queries of a group have the same number of runs. Each end of a run stays, or moves by one key per query.
        last, moves = _extend_slices(runs, counts, first)
        for run in range(counts[first]):
            index = runs.first[first] + run
            slices.append(_slice(first, last, int(runs.starts[index]), int(runs.ends[index]), *moves[run].tolist()))
        if len(slices) > MAX_SLICES:
            raise ValueError(f"attn_mask is made of more than {MAX_SLICES} slices; {REMEDY}")
        first = last + 1
    return slices


def _extend_slices(runs: _Runs, counts: Integers, first: int) -> tuple[int, Integers]:
    """Returns the last query of the longest group from query `first` on, and the moves of its runs' ends, [runs, 2]."""
    run_count = int(counts[first])
    same_count = counts[first:] == run_count
    # The first query with another number of runs (argmin finds the first False), or N.
    end = first + (len(same_count) if same_count.all() else int(same_count.argmin()))
    moves = np.zeros((run_count, 2), dtype=np.int64)
    last, chunk = first, 64
    # Compares queries in chunks of 64, 128, ..., so that a short group does not read all remaining queries.
    while last + 1 < end:
        stop = min(last + 1 + chunk, end)
        index = runs.first[last]
        edges = np.stack([runs.starts, runs.ends], axis=1)[index : index + (stop - last) * run_count]
        chunk_moves = np.diff(edges.reshape(stop - last, run_count, 2), axis=0)
        # The first two queries define the moves that all later queries of the group must repeat.
        if last == first:
            if not np.isin(chunk_moves[0], (0, 1)).all():
                return first, moves
            moves = chunk_moves[0]
        different = (chunk_moves != moves).any(axis=(1, 2))
        if different.any():
            return last + int(different.argmax()), moves
        last, chunk = stop - 1, 2 * chunk
    return last, moves


def _slice(first: int, last: int, start: int, end: int, start_moves: int, end_moves: int) -> Slice:
    # If an end of the run moves with the query, it bounds j - i (low, high). If it is fixed, it is an end of `keys`.
    keys = range(start, end + end_moves * (last - first))
    low = start - first if start_moves else None
    high = end - 1 - first if end_moves else None
    return Slice(range(first, last + 1), keys, low, high)
