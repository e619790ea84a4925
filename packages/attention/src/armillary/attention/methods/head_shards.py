"""The division of heads over the ranks of a head axis, and over the stages of UPipe (arXiv 2602.21196). Pure.

With 8 query heads, 4 key/value heads, 2 ranks and 4 query heads a stage (G = 2 query heads share a key/value head):

    stage   rank 0             rank 1
    0       q 0 2   k 0 1      q 4 6   k 2 3       a round starts with as many different key/value heads as possible
    1       q 1 3   (reused)   q 5 7   (reused)    the next query head of each group uses the same keys

A round is the stages that use the same key/value heads: G, or fewer if a stage has several query heads of each group.
Stages do not change which keys a query head uses: query head h uses key/value head h // G.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

from armillary.attention.tiling.latents import TokenSizes
from armillary.core import SequenceLayout
from armillary.core.internal import integer


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


class KeyTransfers(NamedTuple):
    """How often keys travel in forward and backward of a call, by which a method chooses what it sends.

    Args:
        heads: heads of the U ranks of the head axis; of one rank without a head axis.
        nodes: P, the ranks of the sequence axis between which keys travel; 1 if they stay.
        stage_keys: number of key/value heads in each stage, summed over the U ranks.
        key_sends: how often the head axis sends keys: in forward, and again in backward unless their head shards are
            saved.
        rotates_latents: True if the ring gathers latents over the head axis at each of its steps, not before.
    """

    heads: HeadShards
    nodes: int
    stage_keys: Sequence[int]
    key_sends: int = 1
    rotates_latents: bool = False

    def latents_pay(self, sizes: TokenSizes) -> bool:
        """Returns True if latents have fewer bytes than expanded keys."""
        ranks, nodes, e, a = len(self.heads.keys), self.nodes, sizes.element, sizes.accumulated
        # Bytes of forward and backward, for a token of each of the U ranks. On the head axis gradients are sent as sums
        # over ranks if ranks share heads or latents. A ring makes P - 1 hops of U times as many tokens in each stage:
        # of k and v in forward and in backward, and of their gradients.
        returned, hop = a if self.heads.has_shared_heads else e, 2 * e + a
        expanded = (ranks - 1) * sum(map(len, self.heads.keys)) * (self.key_sends * e + returned)
        expanded += (nodes - 1) * ranks * sum(self.stage_keys) * hop
        if self.rotates_latents:  # hops of single tokens, which are gathered at each of P steps
            latents = ranks * hop * (nodes - 1 + nodes * (ranks - 1))
        else:
            latents = ranks * (ranks - 1) * (self.key_sends * e + a)
            latents += (nodes - 1) * ranks**2 * len(self.stage_keys) * hop
        return latents * sizes.sent < expanded * sizes.head


# -- stages ------------------------------------------------------------------------------------------------------------


class RankHeads(NamedTuple):
    """Heads of one rank in a stage.

    Args:
        queries: query heads, grouped by key/value head.
        keys: key/value heads that these use.
        starts_round: True if the rank receives `keys` before the stage.
        ends_round: True if the rank sends back the gradients of `keys` after the stage.
    """

    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    starts_round: bool = False
    ends_round: bool = False

    def key_heads(self, key_heads: tuple[int, ...]) -> tuple[int, ...]:
        """Returns, for each of `queries`, the index of its key/value head in `keys`.

        Args:
            key_heads: the key/value head of every query head.
        """
        return tuple(self.keys.index(key_heads[head]) for head in self.queries)


class KeyHeads(NamedTuple):
    """The key/value heads that one all-to-all sends to the ranks of the head axis, or back from them.

    Args:
        heads: the heads, each once, in rising order.
        ranges: for each rank, its heads, as indices into `heads`.
    """

    heads: tuple[int, ...]
    ranges: tuple[range, ...]

    @classmethod
    def of(cls, by_rank: Sequence[tuple[int, ...]]) -> KeyHeads:
        """Returns the heads of an all-to-all from the heads of each rank, which are consecutive and may overlap."""
        heads = tuple(sorted({head for keys in by_rank for head in keys}))
        starts = [heads.index(keys[0]) if keys else 0 for keys in by_rank]
        return cls(heads, tuple(range(start, start + len(keys)) for start, keys in zip(starts, by_rank, strict=True)))

    @property
    def has_shared_heads(self) -> bool:
        """True if a head goes to several ranks."""
        return sum(map(len, self.ranges)) > len(self.heads)


@dataclass(frozen=True)
class Stage:
    """A stage of a call: the heads of each rank of the head axis."""

    by_rank: tuple[RankHeads, ...]

    @cached_property
    def queries(self) -> tuple[int, ...]:
        """Query heads of all ranks, in rank order."""
        return tuple(head for heads in self.by_rank for head in heads.queries)

    @cached_property
    def query_ranges(self) -> tuple[range, ...]:
        """For each rank, its query heads as indices into `queries`."""
        counts = [len(heads.queries) for heads in self.by_rank]
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))

    @cached_property
    def key_count(self) -> int:
        """Number of key/value heads, summed over ranks."""
        return sum(len(heads.keys) for heads in self.by_rank)

    @cached_property
    def received_keys(self) -> KeyHeads:
        """Key/value heads that are sent before the stage."""
        return KeyHeads.of([heads.keys if heads.starts_round else () for heads in self.by_rank])

    @cached_property
    def returned_keys(self) -> KeyHeads:
        """Key/value heads whose gradients are sent back after the stage."""
        return KeyHeads.of([heads.keys if heads.ends_round else () for heads in self.by_rank])

    def without_rounds(self) -> Stage:
        """Returns the stage in a call whose keys are expanded from latents, so that no round sends keys."""
        return Stage(tuple(heads._replace(starts_round=False, ends_round=False) for heads in self.by_rank))


@lru_cache(maxsize=256, typed=True)
def stages_of(key_heads: tuple[int, ...], ranks: int, heads_per_stage: int | None = None) -> tuple[Stage, ...]:
    """Returns the stages of a call, each of at most `heads_per_stage` query heads over all ranks.

    Args:
        key_heads: for each query head, its key/value head.
        heads_per_stage: None puts all heads into one stage.

    Raises:
        ValueError: `heads_per_stage` is not a positive multiple of `ranks`.
    """
    per_rank = -(-len(key_heads) // ranks)
    if heads_per_stage is not None:
        per_rank = min(check_heads_per_stage(heads_per_stage, ranks) // ranks, per_rank)
    schedules = (_rank_stages(queries, key_heads, per_rank) for queries in split_heads(key_heads, ranks).queries)
    # A rank with fewer heads has none in the last stages, but takes part in their collectives.
    return tuple(Stage(by_rank) for by_rank in zip_longest(*schedules, fillvalue=RankHeads()))


def _rank_stages(queries: range, key_heads: tuple[int, ...], per_stage: int) -> Iterator[RankHeads]:
    """Yields the heads of one rank in each stage.

    Args:
        queries: the query heads of the rank.
        per_stage: number of query heads of a stage.
    """
    keys = range(key_heads[queries[0]], key_heads[queries[-1]] + 1)
    for start in range(0, len(keys), per_stage):
        # A round has as many key/value heads as a stage has query heads; the last round has the remaining ones.
        round_keys = keys[start : start + per_stage]
        groups = [[head for head in queries if key_heads[head] == key] for key in round_keys]
        # A round of fewer key/value heads has several query heads of each group in a stage.
        per_group = per_stage // len(round_keys)
        starts = range(0, max(map(len, groups)), per_group)  # in each group, the first query head of each stage
        for first in starts:
            heads = tuple(head for group in groups for head in group[first : first + per_group])
            yield RankHeads(heads, tuple(round_keys), first == 0, first == starts[-1])


def check_heads_per_stage(heads_per_stage: int, ranks: int) -> int:
    """Returns the number of query heads of a stage.

    Raises:
        ValueError: the number is not a positive multiple of `ranks`.
    """
    count = integer("heads_per_stage", heads_per_stage)
    if count < 1 or count % ranks:
        raise ValueError(f"heads_per_stage={heads_per_stage} must be a positive multiple of {ranks} ranks")
    return count
