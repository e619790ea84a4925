"""Spreading a sequence over shards so that each has as much attention to compute, in few spans.

Under a causal mask late queries see more keys, and zigzag evens that out: shard r holds chunks r and 2 P - 1 - r. With
documents in a row it no longer does, since a query sees no more than its own document. So the sequence is cut in equal
chunks, a few for each shard, whose visible (query, key) pairs are counted in closed form; each shard gets equally many
chunks, and such ones that the most loaded shard has little more than the mean. Two counts are kept even: the pairs of a
shard's queries, which it computes where keys travel, and those of its keys, which it computes where queries do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from armillary.core.checked import boundaries_of, documents_of, flag, window_of

CHUNKS = (1, 2, 4, 8, 16)
"""Chunks for each shard, to be tried in turn: more of them balance better, and make more spans."""
GOAL = 1.02
"""Slowest over mean that no more chunks are tried for."""
PARTNERS = 32
"""Shards, those with the least to do, that the most loaded one may exchange a chunk with."""

Work = tuple[int, int]
"""(query, key) pairs of some tokens as queries, and as keys."""


@dataclass(frozen=True)
class Visibility:
    """Which keys a query at position i sees: those of its document from i - left to i + right; None: no bound.

    Args:
        ends: boundaries of documents (0, end of the first, ..., N).
    """

    ends: tuple[int, ...]
    left: int | None
    right: int | None

    @classmethod
    def of(
        cls,
        length: int,
        causal: bool,
        window: Sequence[int | None] | None,
        documents: Sequence[int] | None,
    ) -> Visibility:
        """In the terms of an attention mask.

        Raises:
            ValueError: documents that do not rise from 0 to `length`, or a negative window.
        """
        ends = (0, length) if documents is None else boundaries_of(documents, length)
        left, right = window_of(window) or (None, None)
        return cls(ends, left, 0 if flag("causal", causal) else right)

    @classmethod
    def of_rows(
        cls,
        length: int,
        causal: bool,
        window: Sequence[int | None] | None,
        documents: Sequence[int] | Sequence[Sequence[int]] | None,
    ) -> list[Visibility]:
        """Of each row of a batch that has documents of its own, or of all rows alike."""
        rows = documents_of(documents, length)
        per_row = rows if rows and isinstance(rows[0], tuple) else (rows,)
        return [cls.of(length, causal, window, cast("Sequence[int] | None", row)) for row in per_row]

    @property
    def mirrored(self) -> Visibility:
        """Which queries a key is seen by."""
        return Visibility(self.ends, self.right, self.left)

    def seen_from(self, queries: Tensor) -> Tensor:
        """How many keys each of the queries [T] sees."""
        ends = torch.tensor(self.ends)
        document = torch.bucketize(queries, ends, right=True)
        first, last = ends[document - 1], ends[document] - 1
        first = first if self.left is None else torch.maximum(first, queries - self.left)
        last = last if self.right is None else torch.minimum(last, queries + self.right)
        return last - first + 1

    def pairs(self, start: int, stop: int) -> int:
        """Visible (query, key) pairs of the queries start..stop - 1."""
        total, document = 0, bisect_right(self.ends, start) - 1
        while start < stop:
            first, end = self.ends[document], self.ends[document + 1]
            inside = min(stop, end)
            total += self._last_keys(start, inside, end) - self._first_keys(start, inside, first) + inside - start
            start, document = inside, document + 1
        return total

    def _last_keys(self, start: int, stop: int, end: int) -> int:
        """The sum over queries of the last key that each sees, in a document that ends at `end`."""
        if self.right is None:
            return (stop - start) * (end - 1)
        turn = min(max(end - 1 - self.right, start), stop)  # from here on, what bounds them is the document
        return rising(start, turn) + (turn - start) * self.right + (stop - turn) * (end - 1)

    def _first_keys(self, start: int, stop: int, first: int) -> int:
        """The sum over queries of the first key that each sees, in a document that starts at `first`."""
        if self.left is None:
            return (stop - start) * first
        turn = min(max(first + self.left, start), stop)  # up to here, what bounds them is the document
        return (turn - start) * first + rising(turn, stop) - (stop - turn) * self.left


def balanced_spans(length: int, shards: int, rows: Sequence[Visibility]) -> list[list[range]]:
    """The spans of each shard: as few chunks as reach `GOAL`, or those that come nearest to it."""
    best, least = list[list[range]](), float("inf")
    for each in CHUNKS:
        if each > 1 and shards * each > length:
            break
        spans = chunked(length, shards, each, rows)
        found = unevenness([added(work_of(span.start, span.stop, rows) for span in shard) for shard in spans])
        if found < least:
            best, least = spans, found
        if least <= GOAL:
            break
    return best


def work_of(start: int, stop: int, rows: Sequence[Visibility]) -> Work:
    """Pairs of the tokens start..stop - 1 of all rows."""
    return sum(row.pairs(start, stop) for row in rows), sum(row.mirrored.pairs(start, stop) for row in rows)


def added(works: Iterable[Work]) -> Work:
    queries, keys = zip(*works, strict=True)
    return sum(queries), sum(keys)


def unevenness(loads: Sequence[Work]) -> float:
    """The largest of the loads over their mean, which is the same for queries and for keys."""
    return max(map(max, loads)) * len(loads) / sum(queries for queries, _ in loads)


def chunked(length: int, shards: int, each: int, rows: Sequence[Visibility]) -> list[list[range]]:
    """Equal chunks, `each` of them for every shard. Shards' sizes differ by one at most."""
    base, more = divmod(length, shards * each)
    ends = [base * i + min(i, more) for i in range(shards * each + 1)]
    chosen = shared_out([work_of(a, b, rows) for a, b in pairwise(ends)], shards)
    owner = {chunk: shard for shard, chunks in enumerate(chosen) for chunk in chunks}
    longer = [more // shards + (shard < more % shards) for shard in range(shards)]  # chunks that have a token more
    sizes: list[int] = []
    for chunk in range(shards * each):
        sizes.append(base + (longer[owner[chunk]] > 0))
        longer[owner[chunk]] -= 1
    starts = [0, *accumulate(sizes)]
    return [[range(starts[chunk], starts[chunk + 1]) for chunk in chunks] for chunks in chosen]


def rising(start: int, stop: int) -> int:
    """start + (start + 1) + ... + (stop - 1)"""
    return (start + stop - 1) * (stop - start) // 2


def shared_out(work: Sequence[Work], shards: int) -> list[list[int]]:
    """The numbers of pieces for each shard, equally many each, in rising order, so that their work is even.

    The largest first, each to the shard that has the least with it and still has room; then exchanges between the most
    loaded shard and any other, for as long as they help and help is needed.
    """
    room, loads = len(work) // shards, [(0, 0)] * shards
    chosen: list[list[int]] = [[] for _ in range(shards)]
    for piece in sorted(range(len(work)), key=lambda i: (-sum(work[i]), i)):
        free = [shard for shard in range(shards) if len(chosen[shard]) < room]
        shard = min(free, key=lambda s: (peak(loads[s], work[piece]), s))
        chosen[shard].append(piece)
        loads[shard] = moved(loads[shard], work[piece])
    while unevenness(loads) > GOAL and exchange(work, chosen, loads):
        pass
    return [sorted(pieces) for pieces in chosen]


def exchange(work: Sequence[Work], chosen: list[list[int]], loads: list[Work]) -> bool:
    """Swaps two pieces so that the most loaded shard has less, and the other not as much. Whether there were such."""
    heavy = max(range(len(loads)), key=lambda s: max(loads[s]))
    least, best = max(loads[heavy]), None
    side = loads[heavy].index(least)
    partners = sorted(set(range(len(loads))) - {heavy}, key=lambda s: (loads[s][side], s))[:PARTNERS]
    for a in chosen[heavy]:
        without = moved(loads[heavy], work[a], -1)
        for other in partners:
            most = least - loads[other][side]  # what it can take of the larger load and stay below
            for b in chosen[other]:
                if 0 < work[a][side] - work[b][side] < most:
                    with_a = moved(moved(loads[other], work[b], -1), work[a])
                    if (found := max(peak(without, work[b]), *with_a)) < least:
                        least, best = found, (other, a, b)
    if best is None:
        return False
    other, a, b = best
    swap(chosen[heavy], a, b)
    swap(chosen[other], b, a)
    loads[heavy] = moved(moved(loads[heavy], work[a], -1), work[b])
    loads[other] = moved(moved(loads[other], work[b], -1), work[a])
    return True


def moved(load: Work, work: Work, sign: int = 1) -> Work:
    return load[0] + sign * work[0], load[1] + sign * work[1]


def peak(load: Work, more: Work) -> int:
    """The larger side of both together."""
    return max(load[0] + more[0], load[1] + more[1])


def swap(pieces: list[int], out: int, into: int) -> None:
    pieces[pieces.index(out)] = into
