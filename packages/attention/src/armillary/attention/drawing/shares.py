"""Who computes how much of a mask, at which step: the numbers of a picture, and of its command. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from armillary.attention.mask import AttentionMask
from armillary.attention.planning.base import RingWalk
from armillary.attention.registry import DEFAULT_OPTIONS, MethodOptions, named_method
from armillary.attention.tiling.grid import grid_of
from armillary.core import SequenceLayout


class Computed(NamedTuple):
    """A block, and which rank of the sequence axis computes it at which step of forward.

    Args:
        query, key: shards of the walk's layouts.
    """

    rank: int
    step: int
    query: int
    key: int


@dataclass(frozen=True)
class Shares:
    """What each rank of the sequence axis holds of a sequence, and computes of a mask.

    Args:
        length: tokens of the sequence.
        pairs: visible (query, key) pairs in one row of the batch.
        tokens: of each rank.
        by_step: of each rank the pairs that it computes at each step.
    """

    length: int
    pairs: int
    tokens: tuple[int, ...]
    by_step: tuple[tuple[int, ...], ...]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Pairs that each rank computes."""
        return tuple(map(sum, self.by_step))

    @property
    def evenness(self) -> float:
        """The most that a rank computes over the mean: 1 is even."""
        return max(self.by_rank) * len(self.by_rank) / max(self.pairs, 1)

    @property
    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self) | {"by_rank": self.by_rank, "evenness": self.evenness}


def walk_of(layout: SequenceLayout, method: str, options: MethodOptions = DEFAULT_OPTIONS) -> RingWalk:
    """Who computes what under a method, by its name; the ranks of a head axis share what stands for one rank here.

    Raises:
        ValueError: an unknown name, one that leaves the layout's shards unused, or a method that does not say.
    """
    named = named_method(method, options)
    named.check_used(layout.shards, 1)
    return named.sequence_plan(layout.shards).walk(layout)


def computed(walk: RingWalk, mask: AttentionMask) -> Iterator[Computed]:
    """All blocks, those without a visible pair too."""
    grid = grid_of(walk.layout, walk.key_layout, mask)
    for ring in (ring.cheaper_direction(grid) for ring in walk.rings):
        for place, rank in enumerate(ring.ranks):
            for step in range(len(ring.ranks)):
                yield Computed(rank, step, *ring.query_key_shards(place, ring.origin(place, step)))


def shares_of(
    mask: AttentionMask,
    layout: SequenceLayout,
    method: str = "ring",
    row: int = 0,
    options: MethodOptions = DEFAULT_OPTIONS,
) -> Shares:
    """What ranks compute of one row's mask in forward, in one head.

    Args:
        layout: of the sequence axis: one shard for each of its ranks.
        method: a name of `build_attention`.

    Raises:
        ValueError: a mask that does not fit the layout's length, or a method that does not fit its shards.
    """
    walk, mask = walk_of(layout, method, options), mask.row(row)
    grid, steps = grid_of(walk.layout, walk.key_layout, mask), max(len(ring.ranks) for ring in walk.rings)
    by_step = [[0] * steps for _ in range(layout.shards)]
    for rank, step, query, key in computed(walk, mask):
        by_step[rank][step] += grid.pairs(query, key, 1)
    return Shares(layout.length, mask.pairs(layout.length), layout.sizes, tuple(map(tuple, by_step)))
