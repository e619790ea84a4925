"""Which heads meet in which stage of UPipe (arXiv 2602.21196): a pure function of head counts.

With 8 query heads, 4 key/value heads, 2 ranks and 4 heads a stage (G = 2 query heads share a key/value head):

    stage   rank 0             rank 1
    0       q 0 2   k 0 1      q 4 6   k 2 3       a round begins: as many different key/value heads as possible
    1       q 1 3   (on hand)  q 5 7   (on hand)   the next query head of each group meets the same keys

Query head h belongs to key/value head h // G in whatever stage it comes: weights of a trained model keep their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple


class Share(NamedTuple):
    """What one rank does in a stage.

    Args:
        queries: its query heads, grouped by key/value head.
        keys: the key/value heads on hand.
        first, last: whether these have just arrived, and whether they are done with afterwards.
    """

    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    first: bool = False
    last: bool = False

    def key_heads(self, key_heads: tuple[int, ...]) -> tuple[int, ...]:
        """For each query head, which of the heads on hand it uses; given the key/value head of all query heads."""
        return tuple(self.keys.index(key_heads[head]) for head in self.queries)


class Stage(NamedTuple):
    """The shares of all ranks of the head axis."""

    shares: tuple[Share, ...]

    @property
    def queries(self) -> tuple[int, ...]:
        """Query heads of all ranks, in rank order."""
        return tuple(head for share in self.shares for head in share.queries)

    @property
    def query_ranges(self) -> tuple[range, ...]:
        """Where each rank's are in `queries`."""
        return _ranges([len(share.queries) for share in self.shares])

    @property
    def arriving(self) -> Keys:
        """Key/value heads that are sent before the stage."""
        return Keys.of([share.keys if share.first else () for share in self.shares])

    @property
    def leaving(self) -> Keys:
        """Key/value heads whose gradients are sent back after the stage."""
        return Keys.of([share.keys if share.last else () for share in self.shares])


class Keys(NamedTuple):
    """Key/value heads that travel together: each once, in rising order, and which of them are each rank's."""

    heads: tuple[int, ...]
    ranges: tuple[range, ...]

    @classmethod
    def of(cls, by_rank: Sequence[tuple[int, ...]]) -> Keys:
        """Each rank's are consecutive heads, and several ranks may have the same ones."""
        heads = tuple(sorted({head for mine in by_rank for head in mine}))
        starts = [heads.index(mine[0]) if mine else 0 for mine in by_rank]
        return cls(heads, tuple(range(start, start + len(mine)) for start, mine in zip(starts, by_rank, strict=True)))

    @property
    def shared(self) -> bool:
        """Whether a head goes to several ranks."""
        return sum(map(len, self.ranges)) > len(self.heads)


@lru_cache(maxsize=256)
def stages(key_heads: tuple[int, ...], queries: tuple[range, ...], heads_per_stage: int) -> tuple[Stage, ...]:
    """The stages of an attention call, each with at most `heads_per_stage` query heads over all ranks.

    Args:
        key_heads: for each query head, its key/value head.
        queries: the query heads of each rank.
        heads_per_stage: a multiple of the number of ranks.
    """
    at_once = heads_per_stage // len(queries)
    walks = zip_longest(*(_walk(mine, key_heads, at_once) for mine in queries), fillvalue=Share())
    return tuple(Stage(shares) for shares in walks)


def _walk(queries: range, key_heads: tuple[int, ...], at_once: int) -> Iterator[Share]:
    """One rank's stages: rounds over its key/value heads, and in each the query heads of their groups by turns."""
    keys = range(key_heads[queries[0]], key_heads[queries[-1]] + 1)
    for start in range(0, len(keys), at_once):
        on_hand = keys[start : start + at_once]
        groups = [[head for head in queries if key_heads[head] == key] for key in on_hand]
        each = at_once // len(on_hand)
        turns = range(0, max(map(len, groups)), each)
        for turn in turns:
            chosen = tuple(head for group in groups for head in group[turn : turn + each])
            yield Share(chosen, tuple(on_hand), turn == 0, turn == turns[-1])


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))
