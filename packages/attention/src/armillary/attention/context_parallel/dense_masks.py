"""Tensors of `attn_mask` as masks: runs of visible keys, row by row, joined to slices as long as they go on alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention.context_parallel.packing import axes, gather
from armillary.attention.mask import AttentionMask, Slice
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.compat import is_dtensor

Integers = npt.NDArray[np.int64]

SLICES = 2**14
"""So many slices of a row of the batch at most."""

REMEDY = (
    "give a mask of the whole sequence, bool or of 0 and -inf, [N, N], [1 or B, 1, N, N] or with 1 in place of N, or "
    "say it as a value: `with sequence(layout=..., mask=AttentionMask...)`"
)


class MaskReader:
    """Reads each tensor once, for all layers and steps that are given it, and has ranks agree on what it says."""

    def __init__(self, attend: Method) -> None:
        self.attend = attend
        self.found: Any = WeakTensorKeyDictionary()
        """By attn_mask: (its version, rows and tokens, its value)."""

    def read(self, attn_mask: Tensor, batch: int, layout: SequenceLayout) -> AttentionMask:
        """The value of an `attn_mask`. Communicates where it can: every rank of the method must call it.

        Raises:
            ValueError: as `mask_of_tensor`, on every rank where ranks can tell each other; they hold different ones.
        """
        version = None if attn_mask.is_inference() else attn_mask._version
        key = (version, batch, layout.length)
        known = self.found.get(attn_mask)
        if known is not None and version is not None and known[0] == key:
            return known[1]
        mask, fault = None, ""
        try:
            mask = mask_of_tensor(attn_mask, batch, layout.length)
        except ValueError as refused:
            fault = str(refused)
        if axes(self.attend) is not None:
            said = gather([[int(mask is not None), 0 if mask is None else hash(mask)]], self.attend)
            if not fault and not all(known for known, _ in said):
                fault = f"attn_mask of another rank is no mask of the whole sequence; {REMEDY}"
            elif not fault and any(each != said[0] for each in said):
                fault = f"ranks of one sequence were given different values of attn_mask; {REMEDY}"
        if mask is None or fault:
            raise ValueError(fault)
        self.found[attn_mask] = (key, mask)
        return mask


def mask_of_tensor(attn_mask: Tensor, batch: int, length: int) -> AttentionMask:
    """The value of an `attn_mask`, exactly. Looks at each pair, so that it costs B x N x N once for each tensor.

    Args:
        attn_mask: of the whole sequence, not of this rank's tokens; any shape that broadcasts to [B, H, N, N].

    Raises:
        ValueError: it is of a shard, of other heads or rows, a bias, or in more than SLICES slices.
    """
    seen = _visible(attn_mask, batch, length)
    rows = [_of_row(row) for row in seen]
    return rows[0] if all(row == rows[0] for row in rows) else AttentionMask.rows(rows)


def _visible(attn_mask: Tensor, batch: int, length: int) -> npt.NDArray[np.bool_]:
    """Visibility [1 or B, N, N]."""
    shape = tuple(attn_mask.shape)
    if attn_mask.requires_grad:
        raise ValueError(f"attn_mask {shape} requires a gradient: it is a bias; {REMEDY}")
    if is_dtensor(attn_mask):
        raise ValueError(f"attn_mask {shape} is a DTensor; {REMEDY}")
    if attn_mask.ndim < 2 or attn_mask.ndim > 4 or not set(shape[-2:]) <= {1, length}:
        raise ValueError(
            f"attn_mask {shape} is not of the whole sequence of {length} tokens, so that it cannot say what is visible "
            f"on other ranks; {REMEDY}"
        )
    four = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if four.shape[1] > 1:
        if not bool((four == four[:, :1]).all()):
            raise ValueError(f"attn_mask {shape} is another one for each head; {REMEDY}")
        four = four[:, :1]
    if four.shape[0] not in (1, batch):
        raise ValueError(f"attn_mask {shape} has {four.shape[0]} rows; the batch has {batch}; {REMEDY}")
    seen = _without_bias(four[:, 0], shape)
    return seen.expand(-1, length, length).cpu().numpy()


def _without_bias(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Where a mask [B, N, N] lets keys be seen.

    A key with the least number of the dtype is hidden where its query sees others, for its weight is 0 then.
    """
    if attn_mask.dtype == torch.bool:
        return attn_mask
    if not attn_mask.is_floating_point():
        raise ValueError(f"attn_mask is {attn_mask.dtype}; {REMEDY}")
    seen, least = attn_mask == 0, torch.finfo(attn_mask.dtype).min
    other = ~seen & (attn_mask != -torch.inf) & (attn_mask != least)
    if bool(other.any()):
        raise ValueError(f"attn_mask {shape} is a bias: it has {float(attn_mask[other][0]):.4g}; {REMEDY}")
    if bool((~seen.any(-1) & (attn_mask == least).any(-1)).any()):
        raise ValueError(
            f"attn_mask {shape} has {least:.4g} for every key of a query, which then sees them all alike: -inf would "
            f"hide them; {REMEDY}"
        )
    return seen


class _Rows(NamedTuple):
    """Runs of visible keys of all queries, one after the other."""

    first: Integers
    """Where those of each query begin, [N + 1]."""
    starts: Integers
    ends: Integers


def _of_row(seen: npt.NDArray[np.bool_]) -> AttentionMask:
    rows = _runs(seen)
    plain = _plain(rows, len(seen))
    return AttentionMask.of_slices(_slices(rows, len(seen))) if plain is None else plain


def _runs(seen: npt.NDArray[np.bool_]) -> _Rows:
    padded = np.zeros((len(seen), seen.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = seen
    steps = np.diff(padded, axis=1)
    queries, starts = np.nonzero(steps == 1)
    ends = np.nonzero(steps == -1)[1]
    return _Rows(np.searchsorted(queries, np.arange(len(seen) + 1)), starts, ends)


def _plain(rows: _Rows, length: int) -> AttentionMask | None:
    """Causal or not, with a window and documents, where that is all of it; None where it is not."""
    if (np.diff(rows.first) != 1).any():
        return None
    queries, starts, ends = np.arange(length), rows.starts, rows.ends
    reached = np.append(0, np.maximum.accumulate(ends)[:-1])
    needed = np.minimum.accumulate(starts[::-1])[::-1]
    cuts = np.flatnonzero((reached <= queries) & (needed >= queries))
    boundaries = np.append(cuts, length)
    document = np.searchsorted(cuts, queries, side="right") - 1
    low, high = boundaries[document], boundaries[document + 1]
    left, right = int((queries - starts).max()), int((ends - 1 - queries).max())
    if left < 0 or right < 0:
        return None
    before = None if (starts == low).all() else left
    after = None if (ends == high).all() else right
    if before is not None and not (starts == np.maximum(low, queries - before)).all():
        return None
    if after is not None and not (ends == np.minimum(high, queries + after + 1)).all():
        return None
    documents = boundaries.tolist() if len(cuts) > 1 else None
    causal = right == 0
    sides = (before, None if causal else after)
    return AttentionMask(causal, None if sides == (None, None) else sides, documents)


def _slices(rows: _Rows, length: int) -> list[Slice]:
    """Queries in a row with as many runs, whose ends all go on in one way: each stays, or moves by one."""
    found: list[Slice] = []
    first = 0
    counts = np.diff(rows.first)
    while first < length:
        last, moves = _going_on(rows, counts, first)
        for run in range(counts[first]):
            at = rows.first[first] + run
            found.append(_slice(first, last, int(rows.starts[at]), int(rows.ends[at]), *moves[run].tolist()))
        if len(found) > SLICES:
            raise ValueError(f"attn_mask is made of more than {SLICES} slices; {REMEDY}")
        first = last + 1
    return found


def _going_on(rows: _Rows, counts: Integers, first: int) -> tuple[int, Integers]:
    """(the last query that goes on as the first does; how far each run's start and end move from one to the next)."""
    runs = int(counts[first])
    alike = counts[first:] == runs
    end = first + (len(alike) if alike.all() else int(alike.argmin()))
    step, moves = 64, np.zeros((runs, 2), dtype=np.int64)
    last = first
    while last + 1 < end:
        upto = min(last + 1 + step, end)
        edges = np.stack([rows.starts, rows.ends], axis=1)[rows.first[last] : rows.first[last] + (upto - last) * runs]
        moved = np.diff(edges.reshape(upto - last, runs, 2), axis=0)
        if last == first:
            if not np.isin(moved[0], (0, 1)).all():
                return first, moves
            moves = moved[0]
        differ = (moved != moves).any(axis=(1, 2))
        if differ.any():
            return last + int(differ.argmax()), moves
        last, step = upto - 1, 2 * step
    return last, moves


def _slice(first: int, last: int, start: int, end: int, start_moves: int, end_moves: int) -> Slice:
    keys = range(start, end + end_moves * (last - first))
    low = start - first if start_moves else None
    high = end - 1 - first if end_moves else None
    return Slice(range(first, last + 1), keys, low, high)
