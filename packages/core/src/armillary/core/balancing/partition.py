"""Assigns pieces of a sequence to shards, so that the shards' work is balanced by both counts of pairs.

Every shard gets equally many pieces of each kind. All counts are integers, so that ranks that compute a layout
independently get the same one.
"""

from __future__ import annotations

import numpy as np

from armillary.core.slices import Integers

PARTNERS = 8
"""Number of least loaded shards that are tried first as partners of the most loaded one."""


def distribute(work: Integers, kinds: Integers, shards: int, goal: float) -> Integers:
    """Returns the shard of each piece: [n]. Every shard gets equally many pieces of every kind.

    Greedy: the largest piece first, each to the shard whose load is lowest with the piece. Then pieces are swapped
    between the most loaded shard and another, until the goal is reached or no swap helps.

    Args:
        work: pairs of n pieces, by their queries and by their keys: [2, n]. The load of a shard is the larger sum.
        kinds: the kind of each piece, numbered from 0; the number of pieces of each kind is divisible by `shards`.
        goal: load of the most loaded shard at which swaps end.
    """
    owner, loads = largest_first(work, kinds, shards)
    while loads.max() > goal and exchange(work, kinds, owner, loads):
        pass
    return owner


def largest_first(work: Integers, kinds: Integers, shards: int) -> tuple[Integers, Integers]:
    """Returns the shard of each piece, largest pieces first, and the loads of shards by both counts: [2, shards]."""
    # room[k, s]: number of pieces of kind k that shard s still takes.
    room = np.repeat(np.bincount(kinds)[:, None] // shards, shards, axis=1)
    owner, loads = np.empty_like(kinds), np.zeros((2, shards), dtype=np.int64)
    never = np.iinfo(np.int64).max
    for piece in np.argsort(-work.sum(0), kind="stable"):
        peaks = (loads + work[:, piece, None]).max(0)
        shard = np.where(room[kinds[piece]] > 0, peaks, never).argmin()
        owner[piece] = shard
        room[kinds[piece], shard] -= 1
        loads[:, shard] += work[:, piece]
    return owner, loads


def exchange(work: Integers, kinds: Integers, owner: Integers, loads: Integers) -> bool:
    """Swaps a piece of the most loaded shard for one of another shard, so that the larger load of both becomes lowest.

    Changes `owner` and `loads` in place. Returns False if no swap lowers the peak.
    """
    peak = loads.max()
    side, heavy = np.unravel_index(loads.argmax(), loads.shape)
    partners_by_load = np.argsort(loads[side], kind="stable")
    partners_by_load = partners_by_load[partners_by_load != heavy]
    # A swap with one of the least loaded shards usually helps; the others are tried only if it does not.
    for partners in (partners_by_load[:PARTNERS], partners_by_load[PARTNERS:]):
        heavy_pieces, partner_pieces = np.flatnonzero(owner == heavy), np.flatnonzero(np.isin(owner, partners))
        # Change of the heavy shard's loads for each pair of pieces: [2, heavy pieces, partner pieces]. The loads of the
        # partner change by the opposite.
        change = work[:, None, partner_pieces] - work[:, heavy_pieces, None]
        new_peaks = np.maximum(
            loads[:, heavy, None, None] + change, loads[:, None, owner[partner_pieces]] - change
        ).max(0)
        # Only pieces of the same kind may be swapped: the others get a peak that does not count as lower.
        new_peaks[kinds[heavy_pieces, None] != kinds[partner_pieces]] = peak
        if new_peaks.min(initial=peak) < peak:
            a, b = np.unravel_index(new_peaks.argmin(), new_peaks.shape)
            swap(work, owner, loads, int(heavy_pieces[a]), int(partner_pieces[b]))
            return True
    return False


def swap(work: Integers, owner: Integers, loads: Integers, a: int, b: int) -> None:
    """Exchanges two pieces between their shards."""
    difference = work[:, b] - work[:, a]
    loads[:, owner[a]] += difference
    loads[:, owner[b]] -= difference
    owner[a], owner[b] = owner[b], owner[a]
