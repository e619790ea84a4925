"""The division of query and key/value heads over the ranks of a head axis. Pure."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from armillary.core import SequenceLayout


class HeadShards(NamedTuple):
    """Query and key/value heads of each rank of a head axis.

    Args:
        queries: for each rank, its query heads, which are consecutive.
        keys: for each rank, the key/value heads that its query heads use. Ranges overlap where ranks share a head.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @property
    def has_shared_heads(self) -> bool:
        """True if a key/value head is on several ranks."""
        return any(a.stop > b.start for a, b in pairwise(self.keys))

    def key_heads(self, key_heads: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Returns, for each query head of `rank`, the index of its key/value head in `keys[rank]`.

        Args:
            key_heads: the key/value head of every query head.
        """
        return tuple(key_heads[head] - self.keys[rank].start for head in self.queries[rank])


@lru_cache(maxsize=256)
def split_heads(key_heads: tuple[int, ...], ranks: int) -> HeadShards:
    """Returns the heads of each rank: query heads in consecutive ranges, whose sizes differ by at most one.

    Args:
        key_heads: for each query head, its key/value head.
    """
    heads = SequenceLayout.contiguous(len(key_heads), ranks)
    queries = tuple(heads.spans(rank)[0] for rank in range(ranks))
    return HeadShards(queries, tuple(range(key_heads[q[0]], key_heads[q[-1]] + 1) for q in queries))


def check_heads(heads: int, ranks: int, axis: str = "ulysses") -> None:
    """Raises ValueError if there are fewer query heads than ranks."""
    if heads < ranks:
        raise ValueError(
            f"{heads} query heads cannot be split over {ranks} ranks of axis {axis!r}; "
            f"give it at most {heads} ranks and the rest to the sequence axis"
        )
