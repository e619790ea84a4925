"""Sharing out pieces of work that has two sides, so that each shard has as many of a kind and as much on both sides.

Counts are integers throughout: ranks that each find a layout must find the same one.
"""

from __future__ import annotations

import numpy as np

from armillary.core.slices import Integers

PARTNERS = 8
"""Shards, those with the least to do, that the most loaded one is first to exchange a piece with."""


def shared_out(work: Integers, kinds: Integers, shards: int, goal: float) -> Integers:
    """The shard of each piece: to each shard as many of every kind.

    The largest first, each to the shard that has the least with it and still has room; then exchanges between the most
    loaded shard and any other, for as long as they help and help is needed.

    Args:
        work: of n pieces, on both sides: [2, n].
        kinds: of each piece, numbered from 0; of each kind as many as `shards` divides.
        goal: what the most loaded shard may have.
    """
    owner, loads = largest_first(work, kinds, shards)
    while loads.max() > goal and exchange(work, kinds, owner, loads):
        pass
    return owner


def largest_first(work: Integers, kinds: Integers, shards: int) -> tuple[Integers, Integers]:
    """The shard of each piece, and what shards have with that: [2, shards]."""
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
    """Swaps two pieces so that the most loaded shard has less, and the other not as much. Whether there were such."""
    most = loads.max()
    side, heavy = np.unravel_index(loads.argmax(), loads.shape)
    others = np.argsort(loads[side], kind="stable")
    others = others[others != heavy]
    for partners in (others[:PARTNERS], others[PARTNERS:]):
        mine, theirs = np.flatnonzero(owner == heavy), np.flatnonzero(np.isin(owner, partners))
        gain = work[:, None, theirs] - work[:, mine, None]  # of the most loaded shard, for each pair of pieces
        after = np.maximum(loads[:, heavy, None, None] + gain, loads[:, None, owner[theirs]] - gain).max(0)
        after[kinds[mine, None] != kinds[theirs]] = most
        if after.min(initial=most) < most:
            a, b = np.unravel_index(after.argmin(), after.shape)
            swap(work, owner, loads, int(mine[a]), int(theirs[b]))
            return True
    return False


def swap(work: Integers, owner: Integers, loads: Integers, a: int, b: int) -> None:
    """Two pieces between their shards."""
    more = work[:, b] - work[:, a]
    loads[:, owner[a]] += more
    loads[:, owner[b]] -= more
    owner[a], owner[b] = owner[b], owner[a]
